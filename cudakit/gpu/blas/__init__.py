"""What GEMM libraries share; first, the cuBLAS data types for a GEMM (cuBLAS Library, "cublasLtMatmul")."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import numpy as np

from cudakit.errors import CudaError, CudakitError, Unsupported
from cudakit.gpu.api.facts import Capability
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings, never_over
from cudakit.gpu.driver_errors import Status, cuda_error

_DATA_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "fp64": "CUDA_R_64F",
        "fp32": "CUDA_R_32F",
        "fp16": "CUDA_R_16F",
        "bf16": "CUDA_R_16BF",
        "fp8_e4m3": "CUDA_R_8F_E4M3",
        "fp8_e5m2": "CUDA_R_8F_E5M2",
        "int8": "CUDA_R_8I",
        "int32": "CUDA_R_32I",
    }
)

# Names of values of cublasComputeType_t by accumulator.
_COMPUTE_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "fp64": "COMPUTE_64F",
        "fp32": "COMPUTE_32F",
        "fp16": "COMPUTE_16F",
        "int32": "COMPUTE_32I",
    }
)
_TF32 = "COMPUTE_32F_FAST_TF32"

# numpy types of alpha and beta by accumulator.
_SCALAR_TYPES: Mapping[str, type[np.generic]] = MappingProxyType(
    {"fp64": np.float64, "fp32": np.float32, "fp16": np.float16, "int32": np.int32}
)


@dataclass(frozen=True, slots=True)
class TypeNames:
    """Names of the cublasComputeType_t and cudaDataType_t values of a GEMM."""

    compute_type: str
    scale_type: str
    a: str
    b: str
    c: str
    d: str
    bias: str
    scalar: type[np.generic]  # numpy type of alpha and beta; the same type as ``scale_type``.


def type_names(gemm: Gemm) -> TypeNames:
    """Return the type names of a GEMM. If D is fp8, C has the bias type, because C cannot be fp8."""
    d, bias = _DATA_TYPES[gemm.d.element.name], _DATA_TYPES[gemm.bias.name]
    return TypeNames(
        compute_type=_TF32 if gemm.dtype == "tf32" else _COMPUTE_TYPES[gemm.accumulate],
        scale_type=_DATA_TYPES[gemm.accumulate],
        a=_DATA_TYPES[gemm.a.element.name],
        b=_DATA_TYPES[gemm.b.element.name],
        c=bias if is_fp8_output(gemm) else d,
        d=d,
        bias=bias,
        scalar=_SCALAR_TYPES[gemm.accumulate],
    )


def is_fp8_output(gemm: Gemm) -> bool:
    """Return whether D is fp8."""
    return gemm.output.startswith("fp8")


# --- Errors for unsupported GEMMs: checks before a call, and errors from the status of a call ------

CHOOSES_ITSELF = "chooses its algorithm internally"
USE_CUBLASLT = "use cublaslt, which can list and select algorithms"

# Major compute capabilities with all fp8 layouts. Ada (8.9), Hopper (9.0) and Blackwell GeForce (12.x)
# support only layout tn (cuBLAS Library, "cublasLtMatmul").
_FP8_ALL_LAYOUTS = range(10, 12)
_INT8_ALIGNMENT = 4


class BlasStatus(IntEnum):
    """cublasStatus_t (cuBLAS Library)."""

    NOT_INITIALIZED = 1
    ALLOC_FAILED = 3
    INVALID_VALUE = 7
    ARCH_MISMATCH = 8
    MAPPING_ERROR = 11
    EXECUTION_FAILED = 13
    INTERNAL_ERROR = 14
    NOT_SUPPORTED = 15
    LICENSE_ERROR = 16


# Status codes of unsupported calls.
UNSUPPORTED_STATUSES = frozenset(
    {BlasStatus.INVALID_VALUE, BlasStatus.ARCH_MISMATCH, BlasStatus.NOT_SUPPORTED}
)


class WithoutAlgorithms:
    """A base class of libraries that select algorithms internally, and neither list nor accept them."""

    title: str  # Name of the library in messages.

    def heuristics(self, gemm: Gemm, settings: GemmSettings, limit: int) -> Sequence[Algorithm]:  # noqa: ARG002
        """Raise Unsupported: the library does not list algorithms."""
        raise self.selection_error()

    def algorithms(
        self,
        gemm: Gemm,  # noqa: ARG002
        settings: GemmSettings,  # noqa: ARG002
        is_over: Callable[[], bool] = never_over,  # noqa: ARG002
    ) -> Iterator[Algorithm]:
        """Raise Unsupported: the library does not list algorithms."""
        raise self.selection_error()

    def selection_error(self) -> Unsupported:
        """Return the error for listing or selecting an algorithm."""
        return Unsupported(f"{self.title} {CHOOSES_ITSELF}", hint=USE_CUBLASLT)


def check_for_cublaslt(gemm: Gemm, capability: Capability) -> None:
    """Raise Unsupported for a GEMM that is documented as unsupported; the heuristics find all other cases."""
    _check_accumulator(gemm)
    supports_all_layouts = capability.major in _FP8_ALL_LAYOUTS
    if gemm.dtype.startswith("fp8") and gemm.layout != "tn" and not supports_all_layouts:
        raise Unsupported(
            f"{gemm.dtype} supports only layout tn on compute capability {capability}, "
            f"but {gemm.layout} was requested",
            hint="use --layout tn",
        )


def check_for_cublas(gemm: Gemm) -> None:
    """Raise Unsupported for GEMMs that cublasGemmEx does not support (cuBLAS Library, "cublasGemmEx")."""
    _check_accumulator(gemm)
    if gemm.dtype.startswith("fp8"):
        raise Unsupported(f"cuBLAS does not support {gemm.dtype}", hint="use cublaslt")
    if gemm.epilogue != "none":
        raise Unsupported(
            f"cuBLAS has no epilogues, but {gemm.epilogue} was requested", hint="use cublaslt"
        )
    if gemm.dtype == "int8" and (
        gemm.a.leading % _INT8_ALIGNMENT or gemm.b.leading % _INT8_ALIGNMENT
    ):
        raise Unsupported(
            f"int8 needs leading dimensions that are multiples of {_INT8_ALIGNMENT}; A has {gemm.a.leading}, "
            f"B has {gemm.b.leading}",
            hint=f"use multiples of {_INT8_ALIGNMENT} for m, n, k and padding",
        )


def no_algorithm(gemm: Gemm, library: str, capability: Capability) -> Unsupported:
    """Return the error for a GEMM for which the library has no algorithm."""
    return Unsupported(
        f"{library} has no algorithm for {describe_gemm(gemm)} on compute capability {capability}",
        hint=_requirements(gemm),
    )


def call_error(status: int, call: str) -> CudakitError:
    """Return the error for the status of a failed call: Unsupported, or CudaError for other failures."""
    is_documented = status in list(BlasStatus)
    name = (
        f"CUBLAS_STATUS_{BlasStatus(status).name}" if is_documented else f"CUBLAS_STATUS {status}"
    )
    if status in UNSUPPORTED_STATUSES:
        return Unsupported(
            f"{call} is not supported: {name}", hint="try another type, layout, size or workspace"
        )
    return CudaError(status, name, f"{call} failed")


def closed_error(name: str) -> CudaError:
    """Return CUDA_ERROR_INVALID_HANDLE for the use of a closed object."""
    return cuda_error(Status.INVALID_HANDLE, detail=f"{name} was closed")


def describe_gemm(gemm: Gemm) -> str:
    """Return a description of a GEMM for messages."""
    types_text = f"{gemm.dtype} to {gemm.output}, sums in {gemm.accumulate}"
    options = [f"layout {gemm.layout}", f"epilogue {gemm.epilogue}"]
    options += [f"batch {gemm.batch}"] if gemm.batch > 1 else []
    options += [f"padding {gemm.padding}"] if gemm.padding else []
    return f"{gemm.m}×{gemm.n}×{gemm.k} in {types_text}, {', '.join(options)}"


def _check_accumulator(gemm: Gemm) -> None:
    if gemm.accumulate == "fp16" and gemm.output != "fp16":
        raise Unsupported(
            f"an fp16 accumulator needs output fp16, but {gemm.output} was requested",
            hint="use output fp16, or accumulate in fp32",
        )


def _requirements(gemm: Gemm) -> str:
    """Return a hint with the requirements of a data type (cuBLAS Library, "cublasLtMatmul", tables)."""
    if gemm.dtype.startswith("fp8"):
        output_text = ", output bf16" if is_fp8_output(gemm) else ""
        return (
            "fp8 needs compute capability 8.9 or newer, layout tn, and multiples of 16 for m and k"
            f"{output_text}"
        )
    if gemm.dtype == "int8":
        return "int8 needs epilogue none, layout tn, and multiples of 4 for m, k and padding"
    if gemm.epilogue != "none":
        return "use epilogue none"
    if gemm.dtype in ("bf16", "tf32"):
        return f"{gemm.dtype} needs compute capability 8.0 or newer"
    return "allow more workspace, or use the default output and accumulator"
