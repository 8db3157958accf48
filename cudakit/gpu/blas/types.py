"""The cuBLAS data types for a GEMM (cuBLAS Library, "cublasLtMatmul", tables of data types)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from cudakit.gpu.api.gemm import Gemm

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
