"""GEMM: its description, and the protocol of the libraries that compute it (cuBLAS, torch, CuPy).

Matrices are column-major, as in cuBLAS ("Data Layout"): in an r by c matrix with leading dimension d, the
element of row i and column j has index i + j * d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

from cudakit.errors import InputError
from cudakit.gpu.api.elements import (
    BF16,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    FP64,
    INT8,
    INT32,
    Element,
)
from cudakit.gpu.api.values import Ptr, Stream
from cudakit.units import Unavailable

# n: stored as used; t: stored transposed. The first letter is for A, the second for B.
Layout: TypeAlias = Literal["nn", "nt", "tn", "tt"]
Epilogue: TypeAlias = Literal["none", "bias", "relu", "gelu", "relu-bias", "gelu-bias"]
Library: TypeAlias = Literal["cublaslt", "cublas", "torch", "cupy"]

LAYOUTS: tuple[Layout, ...] = ("nn", "nt", "tn", "tt")
EPILOGUES: tuple[Epilogue, ...] = ("none", "bias", "relu", "gelu", "relu-bias", "gelu-bias")
LIBRARIES: tuple[Library, ...] = ("cublaslt", "cublas", "torch", "cupy")

# NVIDIA's recommendation for Hopper (cuBLAS Library, "cublasSetWorkspace"), which torch follows.
WORKSPACE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class DataType:
    """A data type by its name, such as ``bf16``: elements of A and B, possible types of D and accumulators.

    The first of each is the default. The combinations are those of cuBLAS Library, "cublasLtMatmul".
    """

    a: Element
    b: Element
    outputs: tuple[Element, ...]
    accumulators: tuple[str, ...]


DATA_TYPES: Mapping[str, DataType] = MappingProxyType(
    {
        "fp64": DataType(FP64, FP64, (FP64,), ("fp64",)),
        "fp32": DataType(FP32, FP32, (FP32,), ("fp32",)),
        "tf32": DataType(FP32, FP32, (FP32,), ("fp32",)),
        "fp16": DataType(FP16, FP16, (FP16, FP32), ("fp32", "fp16")),
        "bf16": DataType(BF16, BF16, (BF16, FP32), ("fp32",)),
        "fp8_e4m3": DataType(FP8_E4M3, FP8_E4M3, (BF16, FP16, FP32, FP8_E4M3), ("fp32",)),
        # Only one of the two factors may be e5m2.
        "fp8_e5m2": DataType(FP8_E5M2, FP8_E4M3, (BF16, FP16, FP32, FP8_E5M2), ("fp32",)),
        "int8": DataType(INT8, INT8, (INT32,), ("int32",)),
    }
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One operand as stored: ``batch`` consecutive matrices."""

    element: Element
    rows: int
    columns: int
    leading: int  # elements from one column to the next
    batch: int = 1

    @property
    def stride(self) -> int:
        """Elements from one matrix of the batch to the next."""
        return self.leading * self.columns

    @property
    def elements(self) -> int:
        """The number of elements, padding included."""
        return self.stride * self.batch

    @property
    def size_bytes(self) -> int:
        """The bytes of the operand, padding included."""
        return self.elements * self.element.size_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes of the matrices without padding."""
        return self.rows * self.columns * self.batch * self.element.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """D = epilogue(op(A) op(B)), where D is m by n and sums go over k.

    A bias is a vector of m elements, added to every column of D. ``output`` and ``accumulate`` are the
    usual ones of the data type where they are not named. Raises InputError for what makes no sense.
    """

    dtype: str
    m: int
    n: int
    k: int
    layout: Layout = "tn"
    batch: int = 1
    padding: int = 0  # elements by which each leading dimension exceeds the least
    epilogue: Epilogue = "none"
    output: str = ""
    accumulate: str = ""

    def __post_init__(self) -> None:
        _check_name("data type", self.dtype, DATA_TYPES)
        _check_name("layout", self.layout, LAYOUTS)
        _check_name("epilogue", self.epilogue, EPILOGUES)
        for name in ("m", "n", "k", "batch"):
            _check_least(name, getattr(self, name), 1)
        _check_least("padding", self.padding, 0)
        kind = DATA_TYPES[self.dtype]
        outputs = tuple(element.name for element in kind.outputs)
        object.__setattr__(self, "output", self.output or outputs[0])
        object.__setattr__(self, "accumulate", self.accumulate or kind.accumulators[0])
        _check_name(f"output of {self.dtype}", self.output, outputs)
        _check_name(f"accumulator of {self.dtype}", self.accumulate, kind.accumulators)

    @property
    def a(self) -> Matrix:
        """A as stored."""
        shape = (self.m, self.k) if self.layout[0] == "n" else (self.k, self.m)
        return self._matrix(DATA_TYPES[self.dtype].a, *shape)

    @property
    def b(self) -> Matrix:
        """B as stored."""
        shape = (self.k, self.n) if self.layout[1] == "n" else (self.n, self.k)
        return self._matrix(DATA_TYPES[self.dtype].b, *shape)

    @property
    def d(self) -> Matrix:
        """D as stored."""
        outputs = DATA_TYPES[self.dtype].outputs
        element = next(element for element in outputs if element.name == self.output)
        return self._matrix(element, self.m, self.n)

    @property
    def has_bias(self) -> bool:
        """Whether the epilogue adds a bias."""
        return self.epilogue.endswith("bias")

    @property
    def bias(self) -> Element:
        """The type of a bias: that of D, or bf16 with fp8 (cuBLAS Library, "cublasLtMatmul", tables)."""
        narrow = self.d.element.size_bytes == 1 or self.dtype.startswith("fp8")
        return BF16 if narrow and self.output != FP16.name else self.d.element

    @property
    def operations(self) -> int:
        """The number of multiplications and additions, without the epilogue."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def bytes_moved(self) -> int:
        """The least number of bytes read and written: each operand once."""
        bias = self.m * self.bias.size_bytes if self.has_bias else 0
        return self.a.used_bytes + self.b.used_bytes + self.d.used_bytes + bias

    def _matrix(self, element: Element, rows: int, columns: int) -> Matrix:
        return Matrix(element, rows, columns, rows + self.padding, self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSettings:
    """What a library may do. What it has no switch for it ignores; ``Multiplication.settings`` says so."""

    workspace_bytes: int = WORKSPACE_BYTES  # at most
    deterministic: bool = False  # the same bits in every run: no sums in an order that varies
    reduced_precision: bool = True  # whether parts of a sum in fp16 or bf16 may be added as such
    fast_accumulate: bool = False  # of fp8: sums in fewer bits (CUBLASLT_MATMUL_DESC_FAST_ACCUM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A configuration of cuBLASLt (cuBLAS Library, "cublasLtMatmulAlgoConfigAttributes_t"): its numbers."""

    id: int
    tile: int = 0
    stages: int = 0
    split_k: int = 1
    reduction: int = 0  # scheme of split-k, cublasLtReductionScheme_t
    swizzle: int = 0
    custom: int = 0
    inner: int = 0
    cluster: int = 0
    workspace_bytes: int = 0  # that it needs


class Operands(Protocol):
    """The addresses of the matrices; ``bias`` is read only if the epilogue has one."""

    @property
    def a(self) -> Ptr: ...
    @property
    def b(self) -> Ptr: ...
    @property
    def d(self) -> Ptr: ...
    @property
    def bias(self) -> Ptr: ...


class Multiplication(Protocol):
    """A GEMM prepared by a library, to be computed any number of times."""

    @property
    def algorithm(self) -> Algorithm | Unavailable:
        """The chosen algorithm, if the library reports it."""
        ...

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings in effect, as words recorded with a result."""
        ...

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        """Enqueue one computation, which can be captured into a graph."""
        ...

    def close(self) -> None:
        """Free the workspace and everything else. A second time has no effect."""
        ...


def never() -> bool:
    """Return False: never stop."""
    return False


class Blas(Protocol):
    """A library on one device. Raises Unsupported, with the reason, for a GEMM that it cannot compute."""

    @property
    def library(self) -> Library: ...

    @property
    def version(self) -> str:
        """The version of the library: "13.1.0"."""
        ...

    def multiplication(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> Multiplication:
        """Prepare a GEMM, by default with the algorithm that the library prefers."""
        ...

    def heuristics(self, gemm: Gemm, settings: GemmSettings, most: int) -> Sequence[Algorithm]:
        """Return at most ``most`` algorithms in the library's order of preference."""
        ...

    def algorithms(
        self, gemm: Gemm, settings: GemmSettings, is_over: Callable[[], bool] = never
    ) -> Iterator[Algorithm]:
        """Yield every configuration that the library can run, in any order; there may be thousands.

        ``is_over`` stops the search; it is called also while nothing is found, which can take seconds.
        """
        ...

    def close(self) -> None: ...


def _check_name(what: str, name: str, known: Mapping[str, object] | Sequence[str]) -> None:
    if name not in known:
        raise InputError(f"unknown {what} {name!r}", hint=f"choose from {', '.join(known)}")


def _check_least(what: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{what} is {value}, must be at least {least}")
