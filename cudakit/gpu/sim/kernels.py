"""Modules and kernels of a simulated device: launches run registered numpy functions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import Argument, Dim3, Kernel, Module, Stream
from cudakit.gpu.api.arrays import HostKernel, registered_kernels
from cudakit.gpu.device import Handles, check_arguments
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.memory import Bytes, Heap, Span
from cudakit.gpu.sim.schedule import Job, Outcome, Poll
from cudakit.gpu.sim.streams import Queue, SimStreams
from cudakit.trace import events as trace_events
from cudakit.trace.events import Access
from cudakit.trace.kinds import AccessMode, NodeType

# Limits since compute capability 3.0 (CUDA C++ Programming Guide, "Compute Capabilities"), for models
# without these facts.
_LAUNCH_LIMITS = {
    "max_threads_per_block": 1024,
    "max_block_dim_x": 1024,
    "max_block_dim_y": 1024,
    "max_block_dim_z": 64,
    "max_grid_dim_x": (1 << 31) - 1,
    "max_grid_dim_y": (1 << 16) - 1,
    "max_grid_dim_z": (1 << 16) - 1,
    "max_shared_memory_per_block_optin_bytes": 48 << 10,
}


class _LoadedKernel(NamedTuple):
    module: Module
    name: str
    parameter_sizes: tuple[int, ...] | None  # parameter sizes in bytes; None if a type is unknown


class _LaunchShape(NamedTuple):
    name: str
    grid: Dim3
    block: Dim3
    shared_bytes: int = 0


class SimKernels:
    """The modules, kernels and launches of one device."""

    def __init__(
        self,
        context: Context,
        streams: SimStreams,
        heap: Heap,
        host_kernels: Mapping[str, HostKernel] | None,
    ) -> None:
        self.context = context
        self._streams, self._heap = streams, heap
        self._device_host_kernels = dict(host_kernels or {})
        self._limits = {
            name: context.integer_fact(name, default) for name, default in _LAUNCH_LIMITS.items()
        }
        self._clock_khz = context.integer_fact("clock_rate_khz", 1_000_000)
        self._modules: Handles[Signatures] = Handles("module")
        self._kernels: Handles[_LoadedKernel] = Handles("kernel")

    @driver_call
    def compile(self, source: str) -> bytes:
        return image_of(source)

    @driver_call
    def load(self, image: bytes) -> Module:
        return Module(self._modules.add(signatures_of(image)))

    @driver_call
    def unload(self, module: Module) -> None:
        self._modules.remove(module)

    @driver_call
    def kernel(self, module: Module, name: str) -> Kernel:
        signatures = self._modules[module]
        if name not in signatures:
            raise cuda_error(
                Status.NOT_FOUND,
                detail=f'kernel {name}; declare it extern "C" to keep its name unmangled',
            )
        return Kernel(self._kernels.add(_LoadedKernel(module, name, signatures[name])))

    @driver_call
    def launch(
        self,
        kernel: Kernel,
        grid: Dim3,
        block: Dim3,
        args: Sequence[Argument],
        stream: Stream,
        *,
        shared_bytes: int = 0,
    ) -> None:
        loaded_kernel = self._kernels[kernel]
        self._modules[loaded_kernel.module]  # raises if the module was unloaded
        queue = self._streams.checked_queue(stream)
        check_arguments(loaded_kernel.name, loaded_kernel.parameter_sizes, args)
        self._check_shape(loaded_kernel.name, grid, block, shared_bytes)
        shape = _LaunchShape(loaded_kernel.name, grid, block, shared_bytes)
        self._enqueue_launch(queue, shape, self._host_kernel(loaded_kernel.name), args)

    @driver_call
    def launch_host_kernel(
        self,
        host_kernel: HostKernel,
        name: str,
        grid: Dim3,
        block: Dim3,
        args: Sequence[Any],
        stream: Stream,
    ) -> None:
        """Launch a host kernel of a simulated library, without a module."""
        queue = self._streams.checked_queue(stream)
        self._check_shape(name, grid, block, 0)
        self._enqueue_launch(queue, _LaunchShape(name, grid, block), host_kernel, args)

    def close(self) -> None:
        """Remove all kernels and modules."""
        self._kernels.clear()
        self._modules.clear()

    def _host_kernel(self, name: str) -> HostKernel:
        host_kernel = self._device_host_kernels.get(name) or registered_kernels().get(name)
        if host_kernel is None:
            raise UsageError(
                f"the simulated device cannot run kernel {name!r}: no host kernel is registered for it",
                hint=f'implement it in numpy and register it with @host_kernel("{name}")',
            )
        return host_kernel

    def _enqueue_launch(
        self, queue: Queue, shape: _LaunchShape, host_kernel: HostKernel, args: Sequence[Any]
    ) -> None:
        argument_values = tuple(args)
        activity = trace_events.KernelRun(
            0,
            shape.name,
            correlation=0,
            start_ns=0,
            end_ns=0,
            grid=shape.grid,
            block=shape.block,
            shared_bytes=shape.shared_bytes,
        )
        job = Job(
            NodeType.LAUNCH,
            lambda: self._run_host_kernel(host_kernel, shape, argument_values),
            shape.name,
            activity=activity,
        )
        if task := self._streams.submit(queue, job):
            self.context.emit(
                trace_events.Launch(queue.number, shape.name, shape.grid, shape.block), {0: task}
            )

    def _run_host_kernel(
        self, host_kernel: HostKernel, shape: _LaunchShape, args: Sequence[Any]
    ) -> Outcome:
        launch = SimLaunch(*shape, self._heap.span, self.context.schedule.begin_ns, self._clock_khz)
        try:
            host_kernel(launch, *args)
        except CudaError:
            raise
        except MemoryError as error:
            detail = f"the host has too little memory to simulate {launch.name}"
            raise cuda_error(Status.OUT_OF_MEMORY, detail=detail) from error
        except Exception as error:
            raise cuda_error(
                Status.LAUNCH_FAILED, detail=f"the host kernel of {launch.name} raised {error!r}"
            ) from error
        launch.finish()
        accessed_bytes = sum(access.hi - access.lo for access in launch.accesses)
        duration_ns = self.context.costs.device_memory_ns(accessed_bytes) + launch.busy_ns
        return Outcome(duration_ns, tuple(launch.accesses), launch.poll_loop)

    def _check_shape(self, name: str, grid: Dim3, block: Dim3, shared_bytes: int) -> None:
        limits = self._limits
        is_within_limits = [
            0 < extent <= limits[f"max_{kind}_dim_{axis}"]
            for kind, extents in (("grid", grid), ("block", block))
            for axis, extent in zip("xyz", extents, strict=True)
        ]
        thread_count = block[0] * block[1] * block[2]
        if (
            not all(is_within_limits)
            or thread_count > limits["max_threads_per_block"]
            or not 0 <= shared_bytes <= limits["max_shared_memory_per_block_optin_bytes"]
        ):
            launch_text = f"{name} with grid {grid}, block {block}, {shared_bytes} bytes shared"
            raise cuda_error(Status.INVALID_VALUE, detail=launch_text)


# --- The launch of a kernel that runs on the host: its threads and its checked access to simulated memory ---


@dataclass(slots=True)
class SimLaunch:
    """Implements ``api.host_kernels.Launch`` on the memory of a simulated device."""

    name: str
    grid: Dim3
    block: Dim3
    shared_bytes: int
    span: Callable[[int, int, str], Span]
    begin_ns: int = 0  # virtual time at which the launch begins
    clock_khz: int = 1_000_000  # SM clock
    busy_ns: int = 0
    poll_loop: Poll | None = None
    accesses: list[Access] = field(default_factory=list)
    _range_copies: list[tuple[Span, Bytes]] = field(default_factory=list)

    @property
    def threads(self) -> int:
        return prod(self.grid) * prod(self.block)

    def read(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        array = self._view(ptr, np.dtype(dtype), int(count), step_bytes, AccessMode.READ)
        array.flags.writeable = False
        return array

    def write(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        return self._view(ptr, np.dtype(dtype), int(count), step_bytes, AccessMode.WRITE)

    def update(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        return self._view(
            ptr, np.dtype(dtype), int(count), step_bytes, AccessMode.READ | AccessMode.WRITE
        )

    def atomic(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        mode = AccessMode.READ | AccessMode.WRITE | AccessMode.ATOMIC
        return self._view(ptr, np.dtype(dtype), int(count), step_bytes, mode)

    def busy(self, nanoseconds: int) -> None:
        self.busy_ns += int(nanoseconds)

    def poll(
        self, is_done: Callable[[], bool], timeout_ns: int, on_timeout: Callable[[], None]
    ) -> None:
        self.poll_loop = Poll(is_done, timeout_ns, on_timeout)

    @property
    def begin_cycles(self) -> int:
        return self.begin_ns * self.clock_khz // 1_000_000

    def finish(self) -> None:
        """Write back the copies of ranges that span several regions."""
        for span, copy in self._range_copies:
            span.scatter(copy)

    def _view(
        self, ptr: int, dtype: np.dtype[Any], count: int, step_bytes: int, mode: AccessMode
    ) -> npt.NDArray[Any]:
        if count <= 0:
            return np.empty(0, dtype)
        element_step_bytes = step_bytes or dtype.itemsize
        if ptr % dtype.alignment or element_step_bytes % dtype.alignment:
            access_text = f"{self.name} uses {ptr:#x} as {dtype}, step {element_step_bytes}"
            raise cuda_error(Status.MISALIGNED_ADDRESS, detail=access_text)
        size_bytes = element_step_bytes * (count - 1) + dtype.itemsize
        span = self.span(ptr, size_bytes, self.name)
        content = span.gather()
        if len(span.parts) > 1 and mode != AccessMode.READ:
            self._range_copies.append((span, content))
        is_strided = element_step_bytes != dtype.itemsize
        self.accesses.append(
            Access(
                ptr,
                ptr + size_bytes,
                mode,
                stride_bytes=element_step_bytes if is_strided else 0,
                count=count if is_strided else 0,
            )
        )
        return np.ndarray((count,), dtype, content, strides=(element_step_bytes,))


# --- The simulated compiler: kernel names and parameter sizes of CUDA C++ source -------------------

# Sizes of the parameters of each kernel in bytes, by kernel name; None if a parameter type is unknown.
Signatures: TypeAlias = Mapping[str, tuple[int, ...] | None]

_MAGIC = b"cudakit simulated image\n"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)'
)
_TYPEDEF = re.compile(r"\btypedef\s+([\w\s*]+?)\s*\b(\w+)\s*;")
_QUALIFIERS = frozenset({"const", "volatile", "__restrict__", "__grid_constant__", "signed"})
_POINTER_BYTES = 8

# Sizes of types in CUDA C++ on 64-bit Linux.
_TYPE_BYTES = {
    "bool": 1,
    "char": 1,
    "unsigned char": 1,
    "short": 2,
    "unsigned short": 2,
    "int": 4,
    "unsigned": 4,
    "unsigned int": 4,
    "long": 8,
    "unsigned long": 8,
    "long long": 8,
    "unsigned long long": 8,
    "float": 4,
    "double": 8,
    "size_t": 8,
    "int8_t": 1,
    "uint8_t": 1,
    "int16_t": 2,
    "uint16_t": 2,
    "int32_t": 4,
    "uint32_t": 4,
    "int64_t": 8,
    "uint64_t": 8,
    "__half": 2,
    "__nv_bfloat16": 2,
}


def image_of(source: str) -> bytes:
    """Return a simulated image of CUDA C++ source, with its ``extern "C"`` kernels and their parameter sizes.

    Raises a CudaError for text without functions or with unbalanced brackets; other errors are not detected.
    """
    text = _COMMENT.sub(" ", source)
    is_balanced = all(text.count(left) == text.count(right) for left, right in ("()", "[]", "{}"))
    if not is_balanced or (text.strip() and not any(token in text for token in "{;")):
        raise CudaError(
            6,
            "NVRTC_ERROR_COMPILATION",
            "the source does not compile: the simulated compiler found no function, or unbalanced brackets",
        )
    type_sizes = dict(_TYPE_BYTES)
    for definition, name in _TYPEDEF.findall(text):
        size = _POINTER_BYTES if "*" in definition else type_sizes.get(_base_type(definition))
        if size is not None:
            type_sizes[name] = size
    kernels = {
        name: _parameter_sizes(parameters, type_sizes) for name, parameters in _KERNEL.findall(text)
    }
    return _MAGIC + json.dumps(kernels).encode()


def signatures_of(image: bytes) -> Signatures:
    """Return the signatures of an image. Raises CUDA_ERROR_INVALID_IMAGE for other images."""
    if not image.startswith(_MAGIC):
        raise cuda_error(
            Status.INVALID_IMAGE, detail="a simulated device only loads images that it compiled"
        )
    kernels = json.loads(image.removeprefix(_MAGIC))
    return {name: None if sizes is None else tuple(sizes) for name, sizes in kernels.items()}


def _parameter_sizes(parameters: str, type_sizes: Mapping[str, int]) -> list[int] | None:
    """Return the sizes of parameters in bytes; None if a type is unknown."""
    sizes = []
    for parameter in map(str.strip, parameters.split(",")):
        if parameter in ("", "void"):
            continue
        types = (_base_type(parameter), _base_type(parameter.rpartition(" ")[0]))
        known = [type_sizes[name] for name in types if name in type_sizes]
        if "*" not in parameter and not known:
            return None
        sizes.append(_POINTER_BYTES if "*" in parameter else known[0])
    return sizes


def _base_type(declaration: str) -> str:
    type_words = [word for word in declaration.split() if word not in _QUALIFIERS]
    # The type "short int" is "short", and "signed" is "int".
    if len(type_words) > 1 and type_words[-1] == "int" and type_words[-2] != "unsigned":
        type_words.pop()
    return " ".join(type_words) or "int"
