"""What the simulated libraries do not compute: what cuBLAS and cuBLASLt do not, as their documents say."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cudakit.errors import Unsupported
from cudakit.gpu.api.facts import DeviceFacts
from cudakit.gpu.api.gemm import DATA_TYPES, Gemm, Library, Matrix
from cudakit.gpu.blas.refusals import refuse_for_cublas, refuse_for_cublaslt
from cudakit.gpu.sim.rates import capability

# The least compute capability (CUDA C++ Programming Guide, "Compute Capabilities"; for fp8 cuBLAS Library,
# "cublasLtMatmul").
_LEAST: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "fp16": (5, 3),
        "int8": (6, 1),
        "tf32": (8, 0),
        "bf16": (8, 0),
        "fp8_e4m3": (8, 9),
        "fp8_e5m2": (8, 9),
    }
)
# Of columns (cuBLAS Library, "cublasLtMatmul").
_FP8_ALIGNMENT_BYTES = 16
_INT8_ALIGNMENT_BYTES = 4


def refuse_library(library: Library) -> None:
    """Raise Unsupported for a library that works on real devices only."""
    if library not in ("cublaslt", "cublas"):
        raise Unsupported(
            f"{library} needs a real device, and this one is simulated", hint="take --vs cublas"
        )


def refuse_unsupported(gemm: Gemm, library: Library, facts: DeviceFacts) -> None:
    """Raise Unsupported for a product that the library does not compute on a device, with the reason."""
    _check_device(gemm, facts)
    if library == "cublas":
        refuse_for_cublas(gemm)
    else:
        refuse_for_cublaslt(gemm, capability(facts))
    if gemm.dtype.startswith("fp8"):
        _check_alignment(gemm, _FP8_ALIGNMENT_BYTES)
    if gemm.dtype == "int8":
        _check_int8(gemm)


def _check_device(gemm: Gemm, facts: DeviceFacts) -> None:
    have, least = capability(facts), _LEAST.get(gemm.dtype, (0, 0))
    if have < least:
        name = facts.fields.get("name")
        possible = [dtype for dtype in DATA_TYPES if have >= _LEAST.get(dtype, (0, 0))]
        raise Unsupported(
            f"{gemm.dtype} needs compute capability {_version(least)}, {name} has {_version(have)}",
            hint=f"it multiplies {', '.join(possible)}",
        )


def _check_int8(gemm: Gemm) -> None:
    """Check what cuBLAS Library, "cublasLtMatmul", demands of int8 in column-major order."""
    if gemm.epilogue != "none":
        raise Unsupported(
            f"int8 is multiplied without an epilogue, {gemm.epilogue} was asked",
            hint="take epilogue none",
        )
    _check_alignment(gemm, _INT8_ALIGNMENT_BYTES)


def _check_alignment(gemm: Gemm, alignment_bytes: int) -> None:
    for name, matrix in (("A", gemm.a), ("B", gemm.b), ("D", gemm.d)):
        if any(size_bytes % alignment_bytes for size_bytes in _column_bytes(matrix)):
            raise Unsupported(
                f"{gemm.dtype} needs columns of a multiple of {alignment_bytes} bytes, those of {name} "
                f"have {matrix.rows} elements of {matrix.element.size_bytes}, {matrix.leading} apart",
                hint=f"take m, n, k and padding as multiples of {alignment_bytes}",
            )


def _column_bytes(matrix: Matrix) -> tuple[int, int]:
    """Return the bytes of a column, and those from one column to the next."""
    size_bytes = matrix.element.size_bytes
    return matrix.rows * size_bytes, matrix.leading * size_bytes


def _version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
