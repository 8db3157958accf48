"""A product that cuBLASLt is ready to compute."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.gemm import Algorithm, Operands
from cudakit.gpu.blas.descriptors import Problem
from cudakit.gpu.blas.refusals import closed
from cudakit.gpu.blas.search import allowed_reductions
from cudakit.units import format_bytes

if TYPE_CHECKING:
    from cudakit.gpu.blas.cublaslt import CublasLt


class LtMultiplication:
    """One call of cublasLtMatmul, all of whose arguments are ready but the operands and the stream."""

    def __init__(
        self,
        blas: CublasLt,
        problem: Problem,
        structure: Any,
        algorithm: Algorithm,
        *,
        given: bool,
    ) -> None:
        self.algorithm = algorithm
        self.settings: Mapping[str, str] = MappingProxyType(_words(problem, algorithm, given=given))
        self._blas, self._problem = blas, problem
        self._matmul = blas.vendor.lt.matmul
        self._structure = structure  # kept, as only its address is passed on
        self._algorithm_at: int = structure.ctypes.data
        self._workspace_bytes = algorithm.workspace_bytes
        self._workspace = (
            blas.cuda.malloc(self._workspace_bytes) if self._workspace_bytes else Ptr(0)
        )
        self._closed = False

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        """Compute once. Raises CudaError, and CUDA_ERROR_INVALID_HANDLE after ``close``.

        The operands begin at multiples of 256 bytes, as what cuMemAlloc returns does.
        """
        if self._closed:
            raise closed("a product of cuBLASLt")
        problem, cuda = self._problem, self._blas.cuda
        if problem.gemm.has_bias:
            problem.place_bias(operands.bias)
        self._blas.call(
            self._matmul,
            self._blas.handle,
            problem.operation,
            problem.alpha,
            operands.a,
            problem.a,
            operands.b,
            problem.b,
            problem.beta,
            operands.d if problem.reads_c else 0,
            problem.c,
            operands.d,
            problem.d,
            self._algorithm_at,
            self._workspace,
            self._workspace_bytes,
            cuda.stream_address(stream),
            what="cublasLtMatmul",
        )

    def close(self) -> None:
        """Give back the workspace. A second time does nothing, nor does it where the device was closed."""
        if self._closed:
            return
        self._closed = True
        self._problem.close()
        if self._workspace and not self._blas.cuda.closed:
            self._blas.cuda.free(self._workspace)


def _words(problem: Problem, algorithm: Algorithm, *, given: bool) -> dict[str, str]:
    gemm, settings = problem.gemm, problem.settings
    words = {
        "chosen_by": "the user" if given else "the heuristics of cuBLASLt",
        "compute_type": f"CUBLAS_{problem.names.compute}",
        "scale_type": problem.names.scale,
        "workspace": (
            f"{format_bytes(algorithm.workspace_bytes)} used, "
            f"{format_bytes(settings.workspace_bytes)} at most"
        ),
        "deterministic": "yes" if settings.deterministic else "no",
        "reduction_schemes": " ".join(map(str, allowed_reductions(gemm, settings))),
    }
    if gemm.dtype.startswith("fp8"):
        words["scales"] = "1 for each factor"
        words["fast_accumulate"] = "yes" if settings.fast_accumulate else "no"
    return words
