"""Benchmark of operations: add, matmul, softmax and sum by cudakit, torch and CuPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from cudakit.arrays.elementwise import ElementwiseProgram
from cudakit.arrays.fill import Fill
from cudakit.arrays.launch import NO_SCRATCH, LaunchPlan, PlannedKernels, arguments_of
from cudakit.arrays.reduction import ReductionProgram
from cudakit.arrays.softmax import plan_softmax
from cudakit.bench.case import POISON, Cache, Case, Mode, Verification, allocate
from cudakit.bench.gemm_check import OperandSet
from cudakit.bench.labels import CUDAKIT, Axis
from cudakit.bench.ops_check import ArrayBlock, OperationCheck
from cudakit.bench.result import CaseResult
from cudakit.bench.roofline import Work
from cudakit.bench.spec import Spec, check_method, check_names, check_not_empty, check_range, option
from cudakit.bench.timer import l2_size_bytes, work_of_peak
from cudakit.bench.words import Words
from cudakit.errors import InputError, MissingDependency, Unsupported, UsageError
from cudakit.gpu.api import LEGACY, DeviceInfo, Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import FP32, ArrayView
from cudakit.gpu.api.gemm import (
    ARRAY_LIBRARIES,
    OPERATIONS,
    ArrayLibraryName,
    BindableGemmPlan,
    Gemm,
    GemmPlan,
    GemmSettings,
    Operation,
    OperationLibrary,
)
from cudakit.units import Unavailable

# The host time of a call, the GPU time of one execution, and that of one execution within a CUDA graph.
TIMINGS = ("host-call", "eager", "graph")
# Numbers of elements of an input that are measured by default.
_ELEMENTS: Mapping[str, int] = MappingProxyType(
    {"add": 1_000_000, "matmul": 1024 * 1024, "softmax": 10_000, "sum": 1_000_000}
)
_MAX_ELEMENTS = 1 << 31
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


# A function that opens a library on a device.
OpenLibrary: TypeAlias = Callable[[Gpu], OperationLibrary]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsSpec(Spec):
    """Measure add, matmul, softmax and sum of float32 arrays by cudakit, torch and CuPy.

    Samples of the libraries alternate, on equal data. All results are verified in float64. The timings:

    \b
    host-call  the host time of a call, on tensors if torch is installed:
               cudakit.elementwise for add, cudakit.reduction for sum,
               cudakit.softmax for softmax; the call of cuBLASLt for
               matmul, for which cudakit has no public function
    eager      the GPU time of one execution
    graph      the GPU time of one execution in a CUDA graph of many

    matmul is computed by cuBLASLt (pip install 'cudakit[bench]') on square matrices of about N elements.
    softmax has rows of about 10,000 elements, or one row if there are fewer.

    \b
    cudakit bench ops
    cudakit bench ops --sizes 10K..10M:10 -o ops.html
    cudakit bench ops --operations add,sum --timings host-call --vs torch
    """

    bench: ClassVar[str] = "ops"

    rounds: int = 2
    operations: tuple[Operation, ...] = option(
        "--operations",
        "Operations: add, matmul, softmax, sum.  [default: all]",
        default=OPERATIONS,
        choices=OPERATIONS,
    )
    # Numbers of elements of an input. None: a size for each operation.
    sizes: tuple[int, ...] | None = option(
        "--sizes",
        "Elements of each input: a list (10K,1M) or a range that grows by a factor (10K..10M:10); K and M "
        "are 1000 and 1000000.  [default: add 1M, matmul 1024x1024, softmax 10K, sum 1M; with --gpu sim "
        "100K, and matmul 256x256]",
        kind="elements",
        metavar="N,...",
    )
    timings: tuple[str, ...] = option(
        "--timings",
        "Timings: host-call, eager, graph.  [default: all]",
        default=TIMINGS,
        choices=TIMINGS,
    )
    baselines: tuple[ArrayLibraryName, ...] = option(
        "--vs",
        "Libraries to compare with: torch, cupy; none for no comparison.  [default: those installed]",
        default=(),
        choices=ARRAY_LIBRARIES,
    )
    cache: Cache = option(
        "--cache",
        "L2 state of eager and graph: rotate (cycle through buffers) or hot.  [default: rotate]",
        default="rotate",
        kind="choice",
        metavar="STATE",
        choices=("rotate", "hot"),
    )
    # Functions that open cudakit's public function for an operation as a library; its host time is measured.
    # For other operations, the host time is that of the launch of the kernel.
    public_libraries: Mapping[Operation, OpenLibrary] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_names("operation", self.operations, OPERATIONS)
        check_names("timing", self.timings, TIMINGS)
        check_method(None, self.cache)
        if self.cache == "flush":
            raise InputError("bench ops has no --cache flush", hint="use --cache rotate")
        for baseline in self.baselines:
            check_names("library", (baseline,), ARRAY_LIBRARIES)
        check_not_empty("sizes", self.sizes)
        for element_count in self.sizes or ():
            check_range("--sizes", element_count, 1, _MAX_ELEMENTS)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, simulated: bool) -> OpsSpec:
        """Return the Spec of options, among them the ``installed_libraries`` to compare with by default."""
        passed = dict(options)
        installed = passed.pop("installed_libraries")
        baselines = passed.setdefault("baselines", () if simulated else installed)
        if "none" in baselines:
            if len(baselines) > 1:
                raise UsageError("--vs none excludes other libraries", hint="remove none")
            passed["baselines"] = ()
        return cls.with_rule(passed)

    def cases(self, gpu: DeviceInfo) -> tuple[Case, ...]:
        """Return a case per operation, size and timing."""
        default_elements = _SIMULATED_ELEMENTS if gpu.simulated else _ELEMENTS
        l2_bytes = l2_size_bytes(gpu.facts().fields)
        return tuple(
            _case(self, OperationShape(operation, elements), timing, l2_bytes)
            for operation in self.operations
            for elements, timing in product(
                self.sizes or (default_elements[operation],), self.timings
            )
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


# --- cudakit's own kernels, without the public functions --------------------------------------------

_DESCRIPTIONS: Mapping[Operation, str] = MappingProxyType(
    {
        "add": "kernel of cudakit.elementwise('z = x + y')",
        "matmul": "prepared GEMM of cuBLASLt",
        "softmax": "kernel of cudakit.softmax",
        "sum": "kernel of cudakit.reduction('sum(x)')",
    }
)


class KernelLibrary:
    """Launches of cudakit's kernels without the public functions, and GEMMs by cuBLASLt.

    An instance computes one operation on arrays of equal shapes and alignment.
    """

    def __init__(self, gpu: Gpu) -> None:
        # Name and version of the library that computes the operations: those of cuBLASLt after a matmul.
        self.name, self.version = CUDAKIT, ""
        self._gpu = gpu
        self._stream = LEGACY
        self._cleanup = ExitStack()
        self._kernels = self._cleanup.enter_context(closing(PlannedKernels(gpu)))
        # Plan of the kernel for all buffer sets, whose shapes and alignment are equal. None before ``bind``.
        self._plan: LaunchPlan | None = None
        # All launches run in order on one stream at a time, so that they share scratch memory.
        self._scratch = NO_SCRATCH
        self._gemm_plan: GemmPlan | None = None  # GEMM of all buffer sets; None before ``bind``.

    def describe(self, operation: Operation) -> str:
        """Return the kernel or GEMM that computes an operation."""
        return _DESCRIPTIONS[operation]

    def bind(
        self, operation: Operation, inputs: Sequence[ArrayView], output: ArrayView
    ) -> Callable[[], object]:
        """Return a function that launches the kernel or enqueues the GEMM."""
        if operation == "matmul":
            return self._bind_gemm(inputs, output)
        if self._plan is None:
            self._plan = self._plan_of(operation, inputs, output)
            self._scratch = self._zeroed_memory(self._plan.scratch_bytes)
        plan, kernels = self._plan, self._kernels
        arguments = arguments_of(plan, [view.ptr for view in (*inputs, output)], self._scratch)
        return lambda: kernels.launch(plan, arguments, self._stream)

    def set_stream(self, stream: Stream) -> None:
        """Choose the stream of later launches."""
        self._stream = stream

    def close(self) -> None:
        """Unload the kernels and free the scratch memory."""
        self._cleanup.close()

    def _plan_of(
        self, operation: Operation, inputs: Sequence[ArrayView], output: ArrayView
    ) -> LaunchPlan:
        match operation:
            case "add":
                x, y = inputs
                return ElementwiseProgram("z = x + y").plan({"x": x, "y": y}, {"z": output})
            case "softmax":
                return plan_softmax(inputs[0], output)
        return ReductionProgram("sum(x)").plan({"x": inputs[0]}, output)

    def _zeroed_memory(self, size_bytes: int) -> Ptr:
        """Allocate the scratch memory of a kernel, which every launch leaves zeroed."""
        if not size_bytes:
            return NO_SCRATCH
        memory = allocate(self._gpu, self._cleanup, size_bytes)
        self._gpu.fill(memory, 0, size_bytes, LEGACY)
        self._gpu.sync()
        return memory

    def _bind_gemm(self, inputs: Sequence[ArrayView], output: ArrayView) -> Callable[[], object]:
        """Return a function that enqueues a GEMM of row-major matrices.

        Their memory holds the column-major transposes. The transpose of x @ y is the product of the
        transposes in reverse order.
        """
        left, right = inputs
        (rows, inner_size), columns = left.shape, right.shape[1]
        gemm = Gemm(dtype="fp32", m=columns, n=rows, k=inner_size, layout="nn")
        if self._gemm_plan is None:
            self._gemm_plan = self._prepare_gemm(gemm)
        plan, operands = self._gemm_plan, OperandSet(right.ptr, left.ptr, output.ptr, Ptr(0))
        enqueue = (
            plan.bind(operands)
            if isinstance(plan, BindableGemmPlan)
            else partial(plan.enqueue, operands)
        )
        return lambda: enqueue(self._stream)

    def _prepare_gemm(self, gemm: Gemm) -> GemmPlan:
        try:
            blas = self._cleanup.enter_context(closing(self._gpu.blas()))
        except MissingDependency as error:
            raise Unsupported(error.message, hint=error.hint) from error
        self.name, self.version = blas.library, blas.version
        return self._cleanup.enter_context(closing(blas.prepare(gemm, GemmSettings())))


def _explain_rate(cases: Sequence[CaseResult]) -> str:
    units = {case.unit for case in cases if case.amount}
    if "B" not in units:
        return ""
    return f"Rate{'' if units == {'B'} else ' in bytes'}: of all bytes read and written."


OpsSpec.words = Words(rate=_explain_rate)
