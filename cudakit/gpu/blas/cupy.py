"""GEMM by CuPy's public functions, on memory that cudakit allocated."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np

from cudakit.errors import Unsupported
from cudakit.gpu.api import LEGACY, PER_THREAD, Ptr, Stream
from cudakit.gpu.api.gemm import (
    DATA_TYPES,
    Algorithm,
    Gemm,
    GemmSettings,
    Library,
    Operands,
)
from cudakit.gpu.blas.errors import CHOOSES_ITSELF, WithoutAlgorithms, closed_error
from cudakit.gpu.blas.frameworks import Setting, View, run_with, views
from cudakit.gpu.blas.vendor import CudaDevice
from cudakit.gpu.external_streams import stream_of_cupy
from cudakit.units import Unavailable

_DTYPES: Mapping[str, str] = MappingProxyType(
    {"fp64": "float64", "fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
)


class CupyBlas(WithoutAlgorithms):
    """The library CuPy on one device."""

    library: Library = "cupy"
    title = "CuPy"

    def __init__(self, cuda: CudaDevice, cupy: Any) -> None:
        self.cuda, self.cupy = cuda, cupy
        self.version = str(cupy.__version__)
        self._streams: dict[Stream, Any] = {
            LEGACY: cupy.cuda.Stream.null,
            PER_THREAD: cupy.cuda.Stream.ptds,
        }
        self._is_closed = False

    @property
    def cublas_version(self) -> str:
        """The version of the cuBLAS that CuPy loaded (cublasGetVersion), such as "131000"."""
        cuda = self.cupy.cuda
        with cuda.Device(self.cuda.ordinal):
            return str(cuda.cublas.getVersion(cuda.get_cublas_handle()))

    def stream(self, stream: Stream) -> Any:
        """Return the CuPy object for a stream. Raises CUDA_ERROR_INVALID_HANDLE for a destroyed stream."""
        handle = self.cuda.stream_address(stream)
        if self._is_closed:
            raise closed_error(self.library)
        if stream not in self._streams:
            self._streams[stream] = stream_of_cupy(self.cupy, handle)
        return self._streams[stream]

    def prepare(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> CupyGemm:
        """Prepare a GEMM. Raises Unsupported if CuPy would copy operands, or if an algorithm is given."""
        if self._is_closed:
            raise closed_error(self.library)
        if algorithm is not None:
            raise self.selection_error()
        _check_supported(gemm, settings)
        return CupyGemm(self, gemm)

    def close(self) -> None:
        """Release the stream objects. A second call has no effect."""
        self._is_closed = True
        self._streams.clear()


class CupyGemm:
    """A prepared call of cupy.matmul that writes directly into D."""

    def __init__(self, blas: CupyBlas, gemm: Gemm) -> None:
        self.algorithm = Unavailable(f"CuPy {CHOOSES_ITSELF}")
        self._blas = blas
        self._views = views(gemm)
        self._dtype = _dtype(gemm)
        self._framework_settings = _framework_settings(gemm)
        self._arrays: dict[tuple[Ptr, Ptr, Ptr], tuple[Any, Any, Any]] = {}
        self.settings: Mapping[str, str] = MappingProxyType(
            {
                "chosen_by": "CuPy",
                "call": "cupy.matmul",
                "cublas": blas.cublas_version,
                "compute_type": "TF32" if gemm.dtype == "tf32" else "CuPy default",
                "workspace": "allocated by cuBLAS",
            }
        )
        self._is_closed = False

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        """Enqueue one GEMM. Raises Unsupported with CuPy's reason if the call fails."""
        if self._is_closed:
            raise closed_error("the CuPy GEMM")
        cupy = self._blas.cupy
        try:
            with cupy.cuda.Device(self._blas.cuda.ordinal), self._blas.stream(stream):
                left_array, right_array, result_array = self._arrays_of(operands)
                run_with(
                    self._framework_settings,
                    lambda: cupy.matmul(left_array, right_array, out=result_array),
                )
        except (RuntimeError, ValueError, TypeError) as error:
            raise Unsupported(f"cupy.matmul failed: {error}") from error

    def close(self) -> None:
        """Release the array objects, which own no memory. A second call has no effect."""
        self._is_closed = True
        self._arrays.clear()

    def _arrays_of(self, operands: Operands) -> tuple[Any, Any, Any]:
        addresses = (operands.b, operands.a, operands.d)
        if addresses not in self._arrays:
            operand_views = self._views
            left_array, right_array, result_array = (
                self._array(view, address)
                for view, address in zip(
                    (operand_views.left, operand_views.right, operand_views.result),
                    addresses,
                    strict=True,
                )
            )
            self._arrays[addresses] = left_array, right_array, result_array
        return self._arrays[addresses]

    def _array(self, view: View, address: Ptr) -> Any:
        cuda = self._blas.cupy.cuda
        memory = cuda.UnownedMemory(int(address), view.size_bytes, self, self._blas.cuda.ordinal)
        size_bytes = view.element.size_bytes
        return self._blas.cupy.ndarray(
            view.shape,
            self._dtype,
            cuda.MemoryPointer(memory, 0),
            strides=tuple(stride * size_bytes for stride in view.strides),
        )


def _check_supported(gemm: Gemm, settings: GemmSettings) -> None:
    """Raise Unsupported for a GEMM that cupy.matmul cannot compute, or computes only after copying operands.

    Source: cupy/_core/_routines_linalg.pyx, ``tensordot_core`` and ``matmul``.
    """
    if reason := _rejection_reason(gemm):
        raise Unsupported(f"CuPy {reason}", hint="use another library")
    if not settings.reduced_precision and gemm.dtype in ("fp16", "bf16"):
        raise Unsupported("CuPy cannot disable reduced-precision sums", hint="use --vs torch")


def _rejection_reason(gemm: Gemm) -> str:
    if gemm.dtype not in _DTYPES:
        return f"does not support {gemm.dtype}"
    if gemm.output != DATA_TYPES[gemm.dtype].outputs[0].name:
        return f"does not support output {gemm.output} for {gemm.dtype}"
    if gemm.accumulate == "fp16":
        return "has no fp16 accumulator"
    if gemm.epilogue != "none":
        return f"has no epilogues, but {gemm.epilogue} was requested"
    if gemm.batch > 1 and gemm.dtype == "tf32":
        return "does not support tf32 for batches"
    if gemm.padding:
        return "copies padded matrices first"
    if gemm.batch > 1 and gemm.layout != "nn":
        return f"copies batches of layout {gemm.layout} first"
    return ""


def _dtype(gemm: Gemm) -> np.dtype[Any]:
    """Return the numpy dtype of the elements; bf16 needs ml_dtypes, which CuPy registers."""
    try:
        return np.dtype(_DTYPES[gemm.dtype])
    except TypeError as error:
        raise Unsupported(
            "this CuPy does not support bf16", hint="install CuPy 14 or newer, and ml_dtypes"
        ) from error


def _framework_settings(gemm: Gemm) -> tuple[Setting, ...]:
    """Return the CuPy setting that selects fp32 or tf32, whose default depends on the variable CUPY_TF32."""
    if gemm.dtype not in ("fp32", "tf32"):
        return ()
    linalg = import_module("cupy._core._routines_linalg")
    compute_type = linalg.COMPUTE_TYPE_TF32 if gemm.dtype == "tf32" else linalg.COMPUTE_TYPE_DEFAULT
    return (
        Setting(
            read=lambda: linalg.get_compute_type(np.float32),
            write=lambda value: linalg.set_compute_type(np.float32, value),
            value=compute_type,
        ),
    )
