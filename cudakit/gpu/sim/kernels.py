"""Modules and kernels of a simulated device: launches run registered numpy functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import Argument, Dim3, Kernel, Module, Stream
from cudakit.gpu.api.host_kernels import HostKernel, registered_kernels
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.handles import Handles, check_arguments
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.launch import SimLaunch
from cudakit.gpu.sim.queues import Queue
from cudakit.gpu.sim.schedule import Job, Outcome
from cudakit.gpu.sim.source import Signatures, image_of, signatures_of
from cudakit.gpu.sim.space import Heap
from cudakit.gpu.sim.streams import SimStreams
from cudakit.trace import events as trace_events
from cudakit.trace.kinds import NodeType

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
