"""GEMM by cuBLAS: cublasGemmEx and cublasGemmStridedBatchedEx, called through the nvmath-python bindings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings, Library, Matrix, Operands
from cudakit.gpu.blas import (
    CHOOSES_ITSELF,
    WithoutAlgorithms,
    call_error,
    check_for_cublas,
    closed_error,
    type_names,
)
from cudakit.gpu.vendor import CudaDevice, Nvmath
from cudakit.units import Unavailable, format_bytes

_INT32_MAX = 2**31 - 1

# Alignment and minimum size of a workspace: cuBLAS needs a valid address even for 0 bytes (cuBLAS Library,
# "cublasSetWorkspace").
_ALIGNMENT_BYTES = 256


class Cublas(WithoutAlgorithms):
    """cuBLAS on one device. Each GEMM sets stream, workspace and math mode of the shared handle."""

    library: Library = "cublas"
    title = "cuBLAS"

    def __init__(self, cuda: CudaDevice, vendor: Nvmath) -> None:
        self.cuda, self.vendor = cuda, vendor
        cublas = vendor.cublas
        self.version = ".".join(str(cublas.get_property(component)) for component in range(3))
        self._handle: int = self.call(cublas.create, name="cublasCreate")
        # With atomics, results differ between runs (cuBLAS Library, "Reproducibility").
        self.call(
            cublas.set_atomics_mode,
            self._handle,
            cublas.AtomicsMode.NOT_ALLOWED,
            name="cublasSetAtomicsMode",
        )
        self._handle_state: tuple[int, ...] = ()  # Stream, workspace and math mode that are set.

    @property
    def handle(self) -> int:
        """The cuBLAS handle. Raises CUDA_ERROR_INVALID_HANDLE after ``close``."""
        if not self._handle:
            raise closed_error(self.library)
        return self._handle

    def call(self, function: Any, *args: object, name: str) -> Any:
        """Call the library with the device's context current. Raises Unsupported or CudaError."""
        try:
            return self.cuda.in_context(function, *args)
        except self.vendor.cublas.cuBLASError as error:
            raise call_error(error.status, name) from error

    def set_state(self, stream: int, workspace: Ptr, workspace_bytes: int, math_mode: int) -> None:
        """Set stream, workspace and math mode of the handle unless they are already set.

        The stream is set first, because cublasSetStream resets the workspace (cuBLAS Library).
        """
        state = (stream, workspace, workspace_bytes, math_mode)
        if state == self._handle_state:
            return
        cublas, handle = self.vendor.cublas, self.handle
        self._handle_state = ()
        self.call(cublas.set_stream, handle, stream, name="cublasSetStream")
        self.call(
            cublas.set_workspace, handle, workspace, workspace_bytes, name="cublasSetWorkspace"
        )
        self.call(cublas.set_math_mode, handle, math_mode, name="cublasSetMathMode")
        self._handle_state = state

    def invalidate_state(self) -> None:
        """Forget which state the handle has, because the workspace of the handle is about to be freed."""
        self._handle_state = ()

    def prepare(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> CublasGemm:
        """Prepare a GEMM. Raises Unsupported if an algorithm is given: cuBLAS accepts none."""
        if not self._handle:
            raise closed_error(self.library)
        check_for_cublas(gemm)
        if algorithm is not None:
            raise self.selection_error()
        return CublasGemm(self, gemm, settings)

    def close(self) -> None:
        """Destroy the handle. Has no effect if called again, or after the device was closed."""
        if self._handle and not self.cuda.closed:
            self.cuda.in_context(self.vendor.cublas.destroy, self._handle)
        self._handle = 0


class CublasGemm:
    """A prepared call of cublasGemmEx or cublasGemmStridedBatchedEx."""

    def __init__(self, blas: Cublas, gemm: Gemm, settings: GemmSettings) -> None:
        self.algorithm = Unavailable(f"cuBLAS {CHOOSES_ITSELF}")
        self._blas = blas
        self._workspace_bytes = settings.workspace_bytes
        cublas_types = type_names(gemm)
        self._scalars = np.array(
            [1, 0], cublas_types.scalar
        )  # Stored as an attribute, because calls pass addresses of the array's items.
        self._call = _Call(blas.vendor, gemm, self._scalars)
        self._math_mode = _math_mode(blas.vendor, settings)
        self.settings: Mapping[str, str] = MappingProxyType(
            {
                "chosen_by": "cuBLAS",
                "compute_type": f"CUBLAS_{cublas_types.compute_type}",
                "scale_type": cublas_types.scale_type,
                "workspace": f"{format_bytes(settings.workspace_bytes)} given",
                "atomics": "not allowed: the same bits in every run",
                "reduced_precision": "allowed" if settings.reduced_precision else "not allowed",
            }
        )
        self._workspace = blas.cuda.malloc(max(self._workspace_bytes, _ALIGNMENT_BYTES))
        self._is_closed = False

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        """Enqueue one GEMM. Raises CudaError; CUDA_ERROR_INVALID_HANDLE after ``close``."""
        if self._is_closed:
            raise closed_error("the cuBLAS GEMM")
        blas = self._blas
        handle = blas.handle
        blas.set_state(
            blas.cuda.stream_address(stream),
            self._workspace,
            self._workspace_bytes,
            self._math_mode,
        )
        call = self._call
        blas.call(call.function, *call.arguments(handle, operands), name=call.name)

    def close(self) -> None:
        """Free the workspace. Has no effect if called again, or after the device was closed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._blas.invalidate_state()
        if not self._blas.cuda.closed:
            self._blas.cuda.free(self._workspace)


class _Call:
    """The cuBLAS function for a GEMM and the arguments of the call; for a batch, with strides and a count."""

    def __init__(self, vendor: Nvmath, gemm: Gemm, scalars: Any) -> None:
        cublas = vendor.cublas
        cublas_types = type_names(gemm)
        is_batched = gemm.batch > 1
        function_name = "gemm_strided_batched_ex" if is_batched else "gemm_ex"
        self.name = "cublasGemmStridedBatchedEx" if is_batched else "cublasGemmEx"
        self.function = getattr(
            cublas, function_name if _fits_int32(gemm) else f"{function_name}_64"
        )
        transpose_operations = (cublas.Operation[letter.upper()] for letter in gemm.layout)
        alpha, beta = scalars[:1].ctypes.data, scalars[1:].ctypes.data
        self._size_arguments = (*transpose_operations, gemm.m, gemm.n, gemm.k, alpha)
        self._a = _matrix_arguments(gemm.a, vendor.data_type(cublas_types.a), is_batched=is_batched)
        self._b = (
            *_matrix_arguments(gemm.b, vendor.data_type(cublas_types.b), is_batched=is_batched),
            beta,
        )
        self._d = _matrix_arguments(gemm.d, vendor.data_type(cublas_types.d), is_batched=is_batched)
        batch_arguments = (gemm.batch,) if is_batched else ()
        self._trailing_arguments = (
            *batch_arguments,
            vendor.compute_type(cublas_types.compute_type),
            cublas.GemmAlgo.DFALT,
        )

    def arguments(self, handle: int, operands: Operands) -> tuple[object, ...]:
        """Return the arguments in the order of the function's parameters."""
        return (
            handle,
            *self._size_arguments,
            operands.a,
            *self._a,
            operands.b,
            *self._b,
            operands.d,
            *self._d,
            *self._trailing_arguments,
        )


def _matrix_arguments(matrix: Matrix, data_type: int, *, is_batched: bool) -> tuple[int, ...]:
    return (data_type, matrix.leading, matrix.stride) if is_batched else (data_type, matrix.leading)


def _fits_int32(gemm: Gemm) -> bool:
    """Return whether all sizes fit in 32-bit integers; larger sizes need the ``_64`` functions."""
    leading_dimensions = (gemm.a.leading, gemm.b.leading, gemm.d.leading)
    return max(gemm.m, gemm.n, gemm.k, gemm.batch, *leading_dimensions) <= _INT32_MAX


def _math_mode(vendor: Nvmath, settings: GemmSettings) -> int:
    """Return the math mode (cuBLAS Library, "cublasMath_t"). The compute type, not the mode, selects tf32."""
    modes = vendor.cublas.Math
    if settings.reduced_precision:
        return int(modes.DEFAULT_MATH)
    return int(modes.DEFAULT_MATH | modes.DISALLOW_REDUCED_PRECISION_REDUCTION)
