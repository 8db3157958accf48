"""The operations of ``bench ops`` by the kernels of cudakit, and by cuBLASLt for matmul."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from types import MappingProxyType

from cudakit.core.bench.workload import CUDAKIT, allocate
from cudakit.core.bench.workloads.gemm_operands import OperandSet
from cudakit.errors import MissingDependency, Unsupported
from cudakit.gpu.api import LEGACY, Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.api.gemm import Gemm, GemmPlan, GemmSettings
from cudakit.gpu.api.operations import Operation
from cudakit.kernels.elementwise import ElementwiseProgram
from cudakit.kernels.launch_plan import NO_SCRATCH, LaunchPlan, PlannedKernels, arguments_of
from cudakit.kernels.reduction import ReductionProgram
from cudakit.kernels.softmax import plan_softmax

_DESCRIPTIONS: Mapping[Operation, str] = MappingProxyType(
    {
        "add": "kernel of cudakit.elementwise('z = x + y')",
        "matmul": "prepared GEMM of cuBLASLt",
        "softmax": "softmax kernel of cudakit",
        "sum": "kernel of cudakit.reduction('sum(x)')",
    }
)


class KernelLibrary:
    """Launches of cudakit's kernels without the public functions, and GEMMs by cuBLASLt."""

    def __init__(self, gpu: Gpu) -> None:
        # Name and version of the library that computes the operations: those of cuBLASLt after a matmul.
        self.name, self.version = CUDAKIT, ""
        self._gpu = gpu
        self._stream = LEGACY
        self._cleanup = ExitStack()
        self._kernels = self._cleanup.enter_context(closing(PlannedKernels(gpu)))
        self._add = ElementwiseProgram("z = x + y")
        self._sum = ReductionProgram("sum(x)", None)
        # All launches run in order on one stream at a time, so that they share scratch memory.
        self._scratch = NO_SCRATCH
        self._gemm_plan: GemmPlan | None = (
            None  # GEMM of all buffer sets; None before the first one.
        )

    def describe(self, operation: Operation) -> str:
        """Return the kernel or GEMM that computes an operation."""
        return _DESCRIPTIONS[operation]

    def bind(
        self, operation: Operation, inputs: Sequence[ArrayView], output: ArrayView
    ) -> Callable[[], object]:
        """Return a function that launches the kernel or enqueues the GEMM."""
        match operation:
            case "add":
                names = self._add.program.inputs
                plan = self._add.plan(dict(zip(names, inputs, strict=True)), {"z": output})
                return self._launch_of(plan, (*inputs, output))
            case "matmul":
                return self._gemm_of(inputs, output)
            case "softmax":
                return self._launch_of(plan_softmax(output, inputs[0]), (output, inputs[0]))
            case "sum":
                plan = self._sum.plan({"x": inputs[0]}, output)
                return self._launch_of(plan, (inputs[0], output))

    def set_stream(self, stream: Stream) -> None:
        """Choose the stream of later launches."""
        self._stream = stream

    def close(self) -> None:
        """Unload the kernels and free the scratch memory."""
        self._cleanup.close()

    def _launch_of(self, plan: LaunchPlan, operands: Sequence[ArrayView]) -> Callable[[], object]:
        if plan.scratch_bytes and self._scratch == NO_SCRATCH:
            self._scratch = allocate(self._gpu, self._cleanup, plan.scratch_bytes)
            self._gpu.fill(self._scratch, 0, plan.scratch_bytes, LEGACY)
            self._gpu.sync()
        addresses = [view.ptr for view in operands]
        arguments = arguments_of(plan, addresses, self._scratch)
        kernels = self._kernels
        return lambda: kernels.launch(plan, arguments, self._stream)

    def _gemm_of(self, inputs: Sequence[ArrayView], output: ArrayView) -> Callable[[], object]:
        """Return a GEMM of row-major matrices: column-major memory holds their transposes.

        The transpose of x @ y is the product of the transposes in reverse order.
        """
        left, right = inputs
        (rows, inner), columns = left.shape, right.shape[1]
        gemm = Gemm(dtype="fp32", m=columns, n=rows, k=inner, layout="nn")
        if self._gemm_plan is None:  # All buffer sets have equal shapes.
            self._gemm_plan = self._prepare_gemm(gemm)
        plan, operands = self._gemm_plan, OperandSet(right.ptr, left.ptr, output.ptr, Ptr(0))
        return lambda: plan.enqueue(operands, self._stream)

    def _prepare_gemm(self, gemm: Gemm) -> GemmPlan:
        try:
            blas = self._cleanup.enter_context(closing(self._gpu.blas()))
        except MissingDependency as error:
            raise Unsupported(error.message, hint=error.hint) from error
        self.name, self.version = blas.library, blas.version
        return self._cleanup.enter_context(closing(blas.prepare(gemm, GemmSettings())))
