"""Benchmark of operations: add, matmul, softmax and sum by cudakit, torch and CuPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import MappingProxyType

from cudakit.arrays.fill import Fill
from cudakit.bench.case import Case, Verification, allocate
from cudakit.bench.l2_cache import l2_size_bytes, work_of_peak
from cudakit.bench.method import CUDAKIT, Axis, Mode
from cudakit.bench.roofline import Work
from cudakit.bench.spec import OpenLibrary, OpsSpec
from cudakit.bench.workloads.checks import POISON
from cudakit.bench.workloads.ops_check import ArrayBlock, OperationCheck
from cudakit.bench.workloads.ops_kernels import KernelLibrary
from cudakit.errors import Unsupported
from cudakit.gpu.api import LEGACY, DeviceInfo, Gpu, Ptr, Stream
from cudakit.gpu.api.elements import FP32
from cudakit.gpu.api.operations import (
    TARGET_ELEMENTS,
    ArrayLibraryName,
    Operation,
    OperationLibrary,
)
from cudakit.units import Unavailable

# Default sizes on a simulated device, whose kernels run on the CPU.
_SIMULATED_ELEMENTS: Mapping[str, int] = MappingProxyType(
    {"add": 100_000, "matmul": 256 * 256, "softmax": 100_000, "sum": 100_000}
)
# Elements of a row of softmax. Larger arrays have several rows of this size.
_ROW_ELEMENTS = 10_000
_MODES: Mapping[str, Mode] = MappingProxyType(
    {"host-call": "call", "eager": "isolated", "graph": "graph"}
)
# Number of consecutive calls in a sample of host times. With many calls, the slow first calls after an idle
# time matter little. More calls could fill the driver's launch queue (about 1000 launches).
_CALLS_PER_SAMPLE = 20
_LATENCY = Unavailable("a latency has no theoretical peak")


def ops_cases(spec: OpsSpec, gpu: DeviceInfo) -> tuple[Case, ...]:
    """Return a case per operation, size and timing."""
    default_elements = _SIMULATED_ELEMENTS if gpu.simulated else TARGET_ELEMENTS
    l2_bytes = l2_size_bytes(gpu.facts().fields)
    return tuple(
        _case(spec, OperationShape(operation, elements), timing, l2_bytes)
        for operation in spec.operations
        for elements, timing in product(spec.sizes or (default_elements[operation],), spec.timings)
    )


def _case(spec: OpsSpec, shape: OperationShape, timing: str, l2_bytes: int) -> Case:
    is_host_call = timing == "host-call"
    open_library = spec.public_libraries.get(shape.operation) if is_host_call else None
    work: Work | Unavailable = _LATENCY
    if not is_host_call:
        work = work_of_peak(
            Work(shape.operations, "fp32", shape.bytes_moved),
            spec.cache,
            l2_bytes=l2_bytes,
            footprint_bytes=shape.bytes_moved,
        )
    method = spec.method(_MODES[timing], "hot" if is_host_call else spec.cache, fill="uniform")
    if is_host_call:
        method = replace(method, executions=_CALLS_PER_SAMPLE)
    return Case(
        OperationWorkload(shape, timing, CUDAKIT, open_library or KernelLibrary),
        method,
        work,
        other_buffer_bytes=(1 + len(spec.baselines)) * shape.bytes_moved,
        describe_fitting=lambda usable_bytes: (
            f"--sizes {usable_bytes // (len(shape.input_shapes) + 1) // FP32.size_bytes}"
        ),
        baselines=tuple(
            OperationWorkload(shape, timing, name, partial(_open_array_library, name=name))
            for name in spec.baselines
        ),
    )


def _open_array_library(gpu: Gpu, name: ArrayLibraryName) -> OperationLibrary:
    return gpu.array_library(name)


@dataclass(frozen=True, slots=True)
class OperationShape:
    """An operation on arrays of float32, and the shapes of its inputs and output.

    ``elements`` is the size of an input. matmul has square matrices, whose size is rounded down.
    """

    operation: Operation
    elements: int

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each input."""
        match self.operation:
            case "add":
                return ((self.elements,),) * 2
            case "matmul":
                return ((math.isqrt(self.elements),) * 2,) * 2
            case "softmax":
                rows = max(self.elements // _ROW_ELEMENTS, 1)
                return ((rows, self.elements // rows),)
            case "sum":
                return ((self.elements,),)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return () if self.operation == "sum" else self.input_shapes[0]

    @property
    def bytes_moved(self) -> int:
        """Bytes of all inputs and of the output."""
        shapes = (*self.input_shapes, self.output_shape)
        return FP32.size_bytes * sum(map(math.prod, shapes))

    @property
    def operations(self) -> int:
        """Number of additions and multiplications of a matmul; 0 for each other operation."""
        return 2 * math.isqrt(self.elements) ** 3 if self.operation == "matmul" else 0


@dataclass(frozen=True, slots=True)
class OperationWorkload:
    """An operation on arrays, as one library performs it."""

    shape: OperationShape
    timing: str  # "host-call", "eager" or "graph"
    library: str
    open_library: OpenLibrary
    name: str = "ops"

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {
            "operation": self.shape.operation,
            "elements": self.shape.elements,
            "timing": self.timing,
        }

    def prepare(self, gpu: Gpu, seed: int) -> PreparedOperation:
        return PreparedOperation(gpu, self, seed)


class PreparedOperation:
    """The arrays and bound calls of an operation. All buffer sets have equal inputs."""

    def __init__(self, gpu: Gpu, workload: OperationWorkload, seed: int) -> None:
        self._gpu, self._shape, self._seed = gpu, workload.shape, seed
        self.footprint_bytes = workload.shape.bytes_moved
        is_host_call = workload.timing == "host-call"
        # A host time is a latency, which has no rate.
        self.bytes_moved = 0 if is_host_call else workload.shape.bytes_moved
        self.operations = 0 if is_host_call else workload.shape.operations
        self._stream: Stream | None = (
            None  # Stream of the library; None before the first execution.
        )
        self._outputs: list[ArrayBlock] = []
        self._calls: list[Callable[[], object]] = []
        with ExitStack() as cleanup:
            self._cleanup = cleanup
            self._library: OperationLibrary = cleanup.enter_context(
                closing(workload.open_library(gpu))
            )
            self._add_sets(1)
            self._check = OperationCheck(gpu, workload.shape.operation, self._inputs)
            self._run_once()
            self._cleanup = cleanup.pop_all()

    @property
    def settings(self) -> Mapping[str, Axis]:
        """The library, its version, and the call that computes the operation."""
        library = self._library
        version_setting: dict[str, Axis] = {"version": library.version} if library.version else {}
        call_text = library.describe(self._shape.operation)
        return {"library": library.name, **version_setting, "call": call_text}

    def rotate(self, set_count: int) -> None:
        self._add_sets(set_count - len(self._calls))

    def enqueue(self, stream: Stream, set_index: int) -> None:
        if stream != self._stream:
            self._library.set_stream(stream)
            self._stream = stream
        try:
            self._calls[set_index % len(self._calls)]()
        except RuntimeError as error:
            # Errors of torch and CuPy are RuntimeErrors, such as CuPy's for cuBLAS in a stream capture.
            call_text = self._library.describe(self._shape.operation)
            reason = str(error).partition("\n")[0]
            raise Unsupported(f"{call_text} failed: {reason}") from error

    def verify(self) -> Verification:
        verification = self._check.verify(self._outputs)
        for outputs in self._outputs:
            self._poison(outputs)
        self._gpu.sync()
        return verification

    def close(self) -> None:
        self._calls.clear()
        self._cleanup.close()

    def _run_once(self) -> None:
        """Execute the operation once: only then libraries load its kernels, or report that they lack it."""
        self.enqueue(LEGACY, 0)
        self._poison(self._outputs[0])
        self._gpu.sync()

    def _add_sets(self, set_count: int) -> None:
        """Allocate and fill further buffer sets, and bind the calls."""
        if set_count <= 0:
            return
        shape = self._shape
        inputs = [self._allocate(input_shape, set_count) for input_shape in shape.input_shapes]
        outputs = self._allocate(shape.output_shape, set_count)
        with closing(Fill(self._gpu)) as fill:
            for input_index, block in enumerate(inputs):
                for view in block.views:
                    fill.uniform(
                        view.ptr, view.size, FP32, LEGACY, seed=self._seed, sequence=input_index
                    )
            self._poison(outputs)
            self._gpu.sync()
        self._outputs.append(outputs)
        self._inputs = [block.views[0] for block in inputs]
        input_sets = zip(*(block.views for block in inputs), strict=True)
        for input_views, output in zip(input_sets, outputs.views, strict=True):
            self._calls.append(self._library.bind(shape.operation, input_views, output))

    def _allocate(self, shape: tuple[int, ...], count: int) -> ArrayBlock:
        """Allocate ``count`` arrays of a shape in one block of memory."""
        block = ArrayBlock(Ptr(0), shape, count)
        return replace(block, ptr=allocate(self._gpu, self._cleanup, block.size_bytes))

    def _poison(self, block: ArrayBlock) -> None:
        self._gpu.fill(block.ptr, POISON, block.size_bytes, LEGACY)
