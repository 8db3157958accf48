"""The operations of ``bench ops`` by the kernels of cudakit, and by cuBLASLt for matmul."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from types import MappingProxyType

from cudakit.arrays.elementwise import ElementwiseProgram
from cudakit.arrays.launch import NO_SCRATCH, LaunchPlan, PlannedKernels, arguments_of
from cudakit.arrays.reduction import ReductionProgram
from cudakit.arrays.softmax import plan_softmax
from cudakit.bench.case import allocate
from cudakit.bench.gemm_check import OperandSet
from cudakit.bench.method import CUDAKIT
from cudakit.errors import MissingDependency, Unsupported
from cudakit.gpu.api import LEGACY, Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.api.gemm import BindableGemmPlan, Gemm, GemmPlan, GemmSettings
from cudakit.gpu.api.operations import Operation

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
