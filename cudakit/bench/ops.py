"""Benchmark of operations: add, matmul, softmax and sum by cudakit, torch and CuPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.arrays.elementwise import ElementwiseProgram
from cudakit.arrays.fill import Fill
from cudakit.arrays.launch import NO_SCRATCH, LaunchPlan, PlannedKernels, arguments_of
from cudakit.arrays.reduction import ReductionProgram
from cudakit.arrays.softmax import plan_softmax
from cudakit.bench.case import (
    POISON,
    Cache,
    Case,
    Mode,
    Verification,
    allocate,
    verification,
    worst_verification,
)
from cudakit.bench.gemm_check import OperandSet
from cudakit.bench.labels import CUDAKIT, Axis
from cudakit.bench.result import CaseResult
from cudakit.bench.roofline import Work
from cudakit.bench.spec import Spec, check_method, check_names, check_not_empty, check_range, option
from cudakit.bench.timer import l2_size_bytes, work_of_peak
from cudakit.bench.words import Words
from cudakit.errors import InputError, MissingDependency, Unsupported, UsageError
from cudakit.gpu.api import LEGACY, ComputeDevice, DeviceInfo, Gpu, Memory, Ptr, Stream
from cudakit.gpu.api.arrays import FP32, ArrayView, contiguous_strides
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
_ELEMENTS: Mapping[str, int] = {
    "add": 1_000_000,
    "matmul": 1024 * 1024,
    "softmax": 10_000,
    "sum": 1_000_000,
}
_MAX_ELEMENTS = 1 << 31
# Default sizes on a simulated device, whose kernels run on the CPU.
_SIMULATED_ELEMENTS: Mapping[str, int] = {
    "add": 100_000,
    "matmul": 256 * 256,
    "softmax": 100_000,
    "sum": 100_000,
}
# Elements of a row of softmax. Larger arrays have several rows of this size.
_ROW_ELEMENTS = 10_000
_MODES: Mapping[str, Mode] = {"eager": "isolated", "graph": "graph"}
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
        f"Operations: {', '.join(OPERATIONS)}.  [default: all]",
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
    )
    timings: tuple[str, ...] = option(
        "--timings",
        f"Timings: {', '.join(TIMINGS)}.  [default: all]",
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
    open_library: OpenLibrary = KernelLibrary
    if timing == "host-call":
        open_library = spec.public_libraries.get(shape.operation, KernelLibrary)
        work: Work | Unavailable = _LATENCY
        method = replace(spec.method("call", "hot", fill="uniform"), executions=_CALLS_PER_SAMPLE)
    else:
        work = work_of_peak(
            Work(shape.operations, "fp32", shape.bytes_moved),
            spec.cache,
            l2_bytes=l2_bytes,
            footprint_bytes=shape.bytes_moved,
        )
        method = spec.method(_MODES[timing], spec.cache, fill="uniform")
    return Case(
        OperationWorkload(shape, timing, CUDAKIT, open_library),
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
        # Stream of the library; None before the first execution.
        self._stream: Stream | None = None
        self._outputs: list[ArrayBlock] = []
        self._calls: list[Callable[[], object]] = []
        with ExitStack() as cleanup:
            self._cleanup = cleanup
            self._library: OperationLibrary = cleanup.enter_context(
                closing(workload.open_library(gpu))
            )
            self._add_sets(1)
            self._check = OperationCheck(gpu, workload.shape.operation, self._inputs)
            # Only after an execution libraries have loaded their kernels, or report that they lack one.
            self.enqueue(LEGACY, 0)
            self._poison(self._outputs[0])
            gpu.sync()
            self._cleanup = cleanup.pop_all()

    @property
    def settings(self) -> Mapping[str, Axis]:
        """The library, its version, and the call that computes the operation."""
        library = self._library
        version = {"version": library.version} if library.version else {}
        call = library.describe(self._shape.operation)
        return {"library": library.name, **version, "call": call}

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

    def _add_sets(self, set_count: int) -> None:
        """Allocate and fill further buffer sets, and bind the calls."""
        if set_count <= 0:
            return
        shape = self._shape
        *inputs, outputs = (
            ArrayBlock.allocate(self._gpu, self._cleanup, array_shape, set_count)
            for array_shape in (*shape.input_shapes, shape.output_shape)
        )
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

    def _poison(self, block: ArrayBlock) -> None:
        self._gpu.fill(block.ptr, POISON, block.size_bytes, LEGACY)


# --- the check, against an fp64 computation on the host -----------------------------------------------

_ROUNDING = 2.0**-24  # Relative error of one rounding to fp32.
# Tolerances as numbers of roundings. add rounds once; softmax rounds a subtraction, an exponential, a sum and
# a division. The tolerance of sum is relative to the sum of absolute values, so that the rounding errors of
# partial sums contribute little.
_ADD_ROUNDINGS, _SOFTMAX_ROUNDINGS, _SUM_ROUNDINGS = 1, 16, 4
# matmul: rounding errors of a sum of k products grow as the square root of k (N. Higham and T. Mary, "A new
# approach to probabilistic rounding error analysis", 2019). tf32 would exceed the tolerance a hundredfold.
_MATMUL_ROUNDINGS = 2
_CHECKED_ROWS = 16  # Number of rows of a matrix product to check.

_ALIGNMENT_BYTES = 512  # Alignment of every array: good for vector loads of all libraries.

_Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ArrayBlock:
    """One block of device memory with several arrays of float32 of one shape, each aligned."""

    ptr: Ptr
    shape: tuple[int, ...]
    array_count: int

    @property
    def pitch_bytes(self) -> int:
        """Distance between the first bytes of two arrays."""
        size_bytes = FP32.size_bytes * math.prod(self.shape)
        return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @classmethod
    def allocate(
        cls, gpu: Memory, cleanup: ExitStack, shape: tuple[int, ...], count: int
    ) -> ArrayBlock:
        """Allocate memory, which ``cleanup`` frees."""
        block = cls(Ptr(0), shape, count)
        return replace(block, ptr=allocate(gpu, cleanup, block.size_bytes))

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays, including the padding between them."""
        return self.array_count * self.pitch_bytes

    @property
    def views(self) -> list[ArrayView]:
        """Views of the arrays in the block of memory."""
        strides = contiguous_strides(self.shape, FP32.size_bytes)
        addresses = (Ptr(self.ptr + i * self.pitch_bytes) for i in range(self.array_count))
        return [ArrayView(address, "float32", self.shape, strides) for address in addresses]


class OperationCheck:
    """The fp64 result of an operation on given inputs. All outputs that are checked have these inputs."""

    def __init__(
        self, gpu: ComputeDevice, operation: Operation, inputs: Sequence[ArrayView]
    ) -> None:
        self._gpu, self._operation, self._inputs = gpu, operation, inputs
        self._description = "an fp64 computation of all values"
        # Indices of the rows that are checked: of a matrix product the first, the last and some between.
        self._rows: npt.NDArray[np.int64] | None = None
        if operation == "matmul":
            spread = np.linspace(0, inputs[0].shape[0] - 1, _CHECKED_ROWS)
            self._rows = np.unique(spread.astype(np.int64))
            self._description = f"an fp64 computation of {len(self._rows)} rows"

    def verify(self, outputs: Sequence[ArrayBlock]) -> Verification:
        """Compare the first output with fp64, and each other output whose bits differ from the first."""
        distinct: list[npt.NDArray[np.float32]] = []
        for block in outputs:
            padded = self._read(block.ptr, block.size_bytes).reshape(block.array_count, -1)
            arrays = padded[:, : math.prod(block.shape)]
            distinct += [] if distinct else [arrays[0]]
            differs = (arrays.view(np.uint32) != distinct[0].view(np.uint32)).any(axis=1)
            distinct += list(arrays[differs])
        return worst_verification(
            self._verify_output(values.reshape(outputs[0].shape)) for values in distinct
        )

    def _verify_output(self, values: npt.NDArray[np.float32]) -> Verification:
        unwritten = int(np.isnan(values).sum())
        detail = f"{unwritten} of {values.size} values were never written" if unwritten else ""
        reference, norm, roundings = self._reference
        checked = values if self._rows is None else values[self._rows]
        error = float(np.linalg.norm(checked - reference)) / norm
        return verification(error, roundings * _ROUNDING, self._description, detail)

    @cached_property
    def _reference(self) -> tuple[_Values, float, float]:
        """The fp64 result, the norm to which errors are relative, and the tolerance in roundings."""
        first, *others = (
            self._read(view.ptr, view.size * FP32.size_bytes).reshape(view.shape).astype(np.float64)
            for view in self._inputs
        )
        match self._operation:
            case "add":
                result, roundings = first + others[0], float(_ADD_ROUNDINGS)
            case "matmul":
                result = first[self._rows] @ others[0]
                roundings = _MATMUL_ROUNDINGS * math.sqrt(first.shape[1])
            case "softmax":
                exponentials = np.exp(first - first.max(axis=-1, keepdims=True))
                result = exponentials / exponentials.sum(axis=-1, keepdims=True)
                roundings = float(_SOFTMAX_ROUNDINGS)
            case "sum":
                return np.asarray(first.sum()), float(np.abs(first).sum()), _SUM_ROUNDINGS
        return result, float(np.linalg.norm(result)), roundings

    def _read(self, ptr: Ptr, size_bytes: int) -> npt.NDArray[np.float32]:
        """Copy device memory to the host, and wait."""
        host_ptr = self._gpu.host_malloc(size_bytes)
        try:
            self._gpu.copy(host_ptr, ptr, size_bytes, LEGACY)
            self._gpu.sync()
            view = self._gpu.host_view(host_ptr, size_bytes)
            values = np.frombuffer(view, np.float32).copy()
            view.release()
        finally:
            self._gpu.host_free(host_ptr)
        return values


# --- cudakit's own kernels, without the public functions --------------------------------------------

_DESCRIPTIONS: Mapping[Operation, str] = {
    "add": "kernel of cudakit.elementwise('z = x + y')",
    "matmul": "prepared GEMM of cuBLASLt",
    "softmax": "kernel of cudakit.softmax",
    "sum": "kernel of cudakit.reduction('sum(x)')",
}


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
            self._plan = _plan(operation, inputs, output)
            if size_bytes := self._plan.scratch_bytes:
                # Every launch leaves the scratch memory zeroed.
                self._scratch = allocate(self._gpu, self._cleanup, size_bytes)
                self._gpu.fill(self._scratch, 0, size_bytes, LEGACY)
                self._gpu.sync()
        plan, kernels = self._plan, self._kernels
        arguments = arguments_of(plan, [view.ptr for view in (*inputs, output)], self._scratch)
        return lambda: kernels.launch(plan, arguments, self._stream)

    def set_stream(self, stream: Stream) -> None:
        self._stream = stream

    def close(self) -> None:
        self._cleanup.close()

    def _bind_gemm(self, inputs: Sequence[ArrayView], output: ArrayView) -> Callable[[], object]:
        """Return a function that enqueues a GEMM of row-major matrices.

        Their memory holds the column-major transposes. The transpose of x @ y is the product of the
        transposes in reverse order.
        """
        left, right = inputs
        (rows, inner_size), columns = left.shape, right.shape[1]
        gemm = Gemm(dtype="fp32", m=columns, n=rows, k=inner_size, layout="nn")
        if self._gemm_plan is None:
            try:
                blas = self._cleanup.enter_context(closing(self._gpu.blas()))
            except MissingDependency as error:
                raise Unsupported(error.message, hint=error.hint) from error
            self.name, self.version = blas.library, blas.version
            plan = blas.prepare(gemm, GemmSettings())
            self._gemm_plan = self._cleanup.enter_context(closing(plan))
        gemm_plan, operands = self._gemm_plan, OperandSet(right.ptr, left.ptr, output.ptr, Ptr(0))
        enqueue = (
            gemm_plan.bind(operands)
            if isinstance(gemm_plan, BindableGemmPlan)
            else partial(gemm_plan.enqueue, operands)
        )
        return lambda: enqueue(self._stream)


def _plan(operation: Operation, inputs: Sequence[ArrayView], output: ArrayView) -> LaunchPlan:
    match operation:
        case "add":
            x, y = inputs
            return ElementwiseProgram("z = x + y").plan({"x": x, "y": y}, {"z": output})
        case "softmax":
            return plan_softmax(inputs[0], output)
    return ReductionProgram("sum(x)").plan({"x": inputs[0]}, output)


def _explain_rate(cases: Sequence[CaseResult]) -> str:
    units = {case.unit for case in cases if case.amount}
    if "B" not in units:
        return ""
    return f"Rate{'' if units == {'B'} else ' in bytes'}: of all bytes read and written."


OpsSpec.words = Words(rate=_explain_rate)
