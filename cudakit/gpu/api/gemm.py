"""GEMM descriptions, and the protocol of the libraries that compute them (cuBLAS, torch, CuPy).

Matrices are column-major, as in cuBLAS ("Data Layout"): with leading dimension d, element (i, j) has
index i + j * d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from cudakit.errors import InputError
from cudakit.gpu.api.arrays import (
    BF16,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    FP64,
    INT8,
    INT32,
    ArrayView,
    Element,
)
from cudakit.gpu.api.values import Ptr, Stream
from cudakit.units import Unavailable

# The first letter of a layout is the operation of A, the second that of B: n (none) or t (transpose).
Layout: TypeAlias = Literal["nn", "nt", "tn", "tt"]
Epilogue: TypeAlias = Literal["none", "bias", "relu", "gelu", "relu-bias", "gelu-bias"]
Library: TypeAlias = Literal["cublaslt", "cublas", "torch", "cupy"]

LAYOUTS: tuple[Layout, ...] = ("nn", "nt", "tn", "tt")
EPILOGUES: tuple[Epilogue, ...] = ("none", "bias", "relu", "gelu", "relu-bias", "gelu-bias")
LIBRARIES: tuple[Library, ...] = ("cublaslt", "cublas", "torch", "cupy")

# NVIDIA's recommendation for Hopper (cuBLAS Library, "cublasSetWorkspace"), which torch follows.
WORKSPACE_BYTES = 32 << 20
# Largest M = N = K of a GEMM on a simulated device. The CPU computes its values in about two seconds, in
# which a benchmark also fills and verifies the matrices.
MAX_SIMULATED_EDGE = 2048


@dataclass(frozen=True, slots=True)
class DataType:
    """The types of a GEMM: elements of A and B, supported types of D and of accumulators.

    The first type of each list is the default (cuBLAS Library, "cublasLtMatmul").
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
        # At most one of A and B may be e5m2.
        "fp8_e5m2": DataType(FP8_E5M2, FP8_E4M3, (BF16, FP16, FP32, FP8_E5M2), ("fp32",)),
        "int8": DataType(INT8, INT8, (INT32,), ("int32",)),
    }
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A GEMM operand as stored: ``batch`` consecutive matrices."""

    element: Element
    rows: int
    columns: int
    leading: int  # leading dimension in elements
    batch: int = 1

    @property
    def stride(self) -> int:
        """The batch stride in elements."""
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
    """D = epilogue(op(A) op(B)), where D is m by n and k is the inner dimension.

    A bias is a vector of m elements, added to every column of D. ``output`` and ``accumulate``
    default to those of the data type. Raises InputError for unknown names and sizes below 1.
    """

    dtype: str  # data type of A and B
    m: int  # rows of D
    n: int  # columns of D
    k: int  # length of the sums
    layout: Layout = "tn"  # whether A and B are transposed: nn, nt, tn or tt
    batch: int = 1  # number of GEMMs
    padding: int = 0  # elements added to the smallest leading dimension
    epilogue: Epilogue = "none"  # operation fused into the GEMM
    output: str = ""  # data type of D
    accumulate: str = ""  # data type of the sums

    def __post_init__(self) -> None:
        _check_name("data type", self.dtype, DATA_TYPES)
        _check_name("layout", self.layout, LAYOUTS)
        _check_name("epilogue", self.epilogue, EPILOGUES)
        for name in ("m", "n", "k"):
            _check_minimum(name, getattr(self, name), 1)
        _check_minimum("--batch", self.batch, 1)
        _check_minimum("--padding", self.padding, 0)
        data_type = DATA_TYPES[self.dtype]
        outputs = tuple(element.name for element in data_type.outputs)
        object.__setattr__(self, "output", self.output or outputs[0])
        object.__setattr__(self, "accumulate", self.accumulate or data_type.accumulators[0])
        _check_type(self.dtype, "output", self.output, outputs)
        _check_type(self.dtype, "accumulator", self.accumulate, data_type.accumulators)

    @property
    def a(self) -> Matrix:
        """The matrix A as it is stored, before transposition."""
        shape = (self.m, self.k) if self.layout[0] == "n" else (self.k, self.m)
        return self._matrix(DATA_TYPES[self.dtype].a, *shape)

    @property
    def b(self) -> Matrix:
        """The matrix B as it is stored, before transposition."""
        shape = (self.k, self.n) if self.layout[1] == "n" else (self.n, self.k)
        return self._matrix(DATA_TYPES[self.dtype].b, *shape)

    @property
    def d(self) -> Matrix:
        """The matrix D as it is stored."""
        outputs = DATA_TYPES[self.dtype].outputs
        element = next(element for element in outputs if element.name == self.output)
        return self._matrix(element, self.m, self.n)

    @property
    def has_bias(self) -> bool:
        """Whether the epilogue adds a bias."""
        return self.epilogue.endswith("bias")

    @property
    def bias(self) -> Element:
        """The bias type: that of D, or bf16 with fp8 (cuBLAS Library, "cublasLtMatmul", tables)."""
        has_fp8 = self.d.element.size_bytes == 1 or self.dtype.startswith("fp8")
        return BF16 if has_fp8 and self.output != FP16.name else self.d.element

    @property
    def operations(self) -> int:
        """The number of floating-point operations, 2mnk per GEMM, without the epilogue."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def bytes_moved(self) -> int:
        """The minimum number of bytes read and written: each operand once."""
        bias = self.m * self.bias.size_bytes if self.has_bias else 0
        return self.a.used_bytes + self.b.used_bytes + self.d.used_bytes + bias

    def _matrix(self, element: Element, rows: int, columns: int) -> Matrix:
        return Matrix(element, rows, columns, rows + self.padding, self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSettings:
    """Options for a library, which ignores unsupported ones; ``GemmPlan.settings`` has the effective ones."""

    workspace_bytes: int = WORKSPACE_BYTES  # maximum size of the workspace
    deterministic: bool = False  # whether results must be bitwise reproducible
    reduced_precision: bool = True  # whether to allow reductions in fp16 or bf16
    # fp8: accumulate with fewer bits (CUBLASLT_MATMUL_DESC_FAST_ACCUM)
    fast_accumulate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A cuBLASLt algorithm and its configuration.

    Field names follow cublasLtMatmulAlgoConfigAttributes_t (cuBLAS Library), which documents the values.
    """

    id: int
    tile: int = 0
    stages: int = 0
    split_k: int = 1
    reduction: int = 0  # how split-k results are added: a cublasLtReductionScheme_t
    swizzle: int = 0
    custom: int = 0
    inner: int = 0
    cluster: int = 0
    workspace_bytes: int = 0  # required size of the workspace


class Operands(Protocol):
    """The device addresses of the matrices A, B and D, and of the bias, if the epilogue has one."""

    @property
    def a(self) -> Ptr: ...
    @property
    def b(self) -> Ptr: ...
    @property
    def d(self) -> Ptr: ...
    @property
    def bias(self) -> Ptr: ...


class GemmPlan(Protocol):
    """A prepared GEMM, which can be enqueued any number of times."""

    @property
    def algorithm(self) -> Algorithm | Unavailable:
        """The chosen algorithm, if the library reports it."""

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings in effect, as text recorded with results."""

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        """Enqueue the GEMM. Can be called during a stream capture."""

    def close(self) -> None:
        """Free the workspace and all other resources. A second call has no effect."""


@runtime_checkable
class BindableGemmPlan(Protocol):
    """A prepared GEMM whose operands can be fixed, so that a call takes less time on the host."""

    def bind(self, operands: Operands) -> Callable[[Stream], None]:
        """Return a function that enqueues the GEMM with these operands, like ``enqueue``."""


def never_over() -> bool:
    """Return False: the default ``is_over`` callback, which never ends a search."""
    return False


class Blas(Protocol):
    """A GEMM library on one device. Raises Unsupported, with the reason, for an unsupported GEMM."""

    @property
    def library(self) -> Library:
        """The name of the library."""

    @property
    def version(self) -> str:
        """The version of the library, such as "13.1.0"."""

    def prepare(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> GemmPlan:
        """Prepare a GEMM, by default with the library's preferred algorithm."""

    def heuristics(self, gemm: Gemm, settings: GemmSettings, limit: int) -> Sequence[Algorithm]:
        """Return at most ``limit`` algorithms in the library's order of preference."""

    def algorithms(
        self, gemm: Gemm, settings: GemmSettings, is_over: Callable[[], bool] = never_over
    ) -> Iterator[Algorithm]:
        """Yield every supported configuration, in any order; there may be thousands.

        The search stops once ``is_over`` returns True, which is checked even if nothing is yielded.
        """

    def close(self) -> None:
        """Release the library's handle and reject later calls. A second call has no effect."""


def _check_name(kind: str, name: str, valid_names: Mapping[str, object] | Sequence[str]) -> None:
    if name not in valid_names:
        raise InputError(f"unknown {kind} {name!r}", hint=f"choose from {', '.join(valid_names)}")


def _check_type(dtype: str, kind: str, name: str, valid_names: Sequence[str]) -> None:
    if name not in valid_names:
        raise InputError(
            f"{dtype} GEMMs have no {kind} type {name!r}",
            hint=f"choose from {', '.join(valid_names)}",
        )


def _check_minimum(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise InputError(f"{name} is {value}; it must be at least {minimum}")


# --- The protocol of libraries that compute the operations of ``cudakit bench ops`` on arrays of float32 ---

Operation: TypeAlias = Literal["add", "matmul", "softmax", "sum"]
# add: x + y. matmul: x @ y of two matrices. softmax: over the last axis of x. sum: of all elements of x.
OPERATIONS: tuple[Operation, ...] = ("add", "matmul", "softmax", "sum")
ArrayLibraryName: TypeAlias = Literal["torch", "cupy"]
ARRAY_LIBRARIES: tuple[ArrayLibraryName, ...] = ("torch", "cupy")


class OperationLibrary(Protocol):
    """A library that computes operations on memory that the caller allocated."""

    @property
    def name(self) -> str:
        """Name of the library: "torch"."""

    @property
    def version(self) -> str:
        """Version of the library: "2.11.0"."""

    def describe(self, operation: Operation) -> str:
        """Return the call that computes an operation: "torch.add(x, y, out=z)"."""

    def bind(
        self, operation: Operation, inputs: Sequence[ArrayView], output: ArrayView
    ) -> Callable[[], object]:
        """Return a function that enqueues an operation on the stream of ``set_stream``.

        The views are C-contiguous arrays of float32. Raises Unsupported if the library lacks the operation.
        """

    def set_stream(self, stream: Stream) -> None:
        """Choose the stream of later calls, until ``close`` restores the previous stream of the library."""

    def close(self) -> None:
        """Release the arrays on the caller's memory, and restore the library's stream."""
