"""A product of column-major matrices, as a library that thinks row by row sees the same memory.

Read row by row, column-major memory holds the transpose. D = op(A) op(B) is therefore the product of
op(B) transposed and op(A) transposed, in this order, which gives D transposed: the same call of cuBLAS in
the end, as those libraries swap the factors themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudakit.gpu.api.elements import Element
from cudakit.gpu.api.gemm import Gemm, Matrix


@dataclass(frozen=True, slots=True)
class View:
    """An array over memory; strides in elements, the batch first where there is one."""

    element: Element
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size_bytes: int  # of all the memory, which begins at the first element


@dataclass(frozen=True, slots=True)
class Views:
    """``left`` (n by k) times ``right`` (k by m) is ``result`` (n by m)."""

    left: View
    right: View
    result: View
    bias: View  # m


def views(gemm: Gemm) -> Views:
    """Describe the operands of a product; ``bias`` is meant where the epilogue has one."""
    bias = View(gemm.bias, (gemm.m,), (1,), gemm.m * gemm.bias.size_bytes)
    return Views(
        left=_view(gemm.b, (gemm.n, gemm.k), transposed=gemm.layout[1] == "t"),
        right=_view(gemm.a, (gemm.k, gemm.m), transposed=gemm.layout[0] == "t"),
        result=_view(gemm.d, (gemm.n, gemm.m), transposed=False),
        bias=bias,
    )


def _view(matrix: Matrix, shape: tuple[int, int], *, transposed: bool) -> View:
    strides = (1, matrix.leading) if transposed else (matrix.leading, 1)
    if matrix.batch == 1:
        return View(matrix.element, shape, strides, matrix.size_bytes)
    return View(
        matrix.element, (matrix.batch, *shape), (matrix.stride, *strides), matrix.size_bytes
    )
