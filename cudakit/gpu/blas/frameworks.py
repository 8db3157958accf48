"""Common to calls of torch and CuPy: operands in row-major order, and process-wide settings.

Read row by row, column-major memory holds the transpose. D = op(A) op(B) is therefore the product of
op(B) transposed and op(A) transposed, in this order, which gives D transposed: the same call of cuBLAS in
the end, as those libraries swap the factors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cudakit.gpu.api.elements import Element
from cudakit.gpu.api.gemm import Gemm, Matrix


@dataclass(frozen=True, slots=True)
class View:
    """An array over memory; strides are in elements, a batch dimension comes first."""

    element: Element
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size_bytes: int  # of the memory from the first element on


@dataclass(frozen=True, slots=True)
class Views:
    """``left`` (n by k) times ``right`` (k by m) is ``result`` (n by m)."""

    left: View
    right: View
    result: View
    bias: View  # m


def views(gemm: Gemm) -> Views:
    """Return the views of a GEMM's operands; ``bias`` applies if the epilogue has one."""
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


@dataclass(frozen=True, slots=True)
class Switch:
    """A setting, and the value that it must have."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    value: Any


def attribute(holder: Any, name: str, value: Any) -> Switch:
    """Return a switch for an attribute of an object."""
    return Switch(partial(getattr, holder, name), partial(setattr, holder, name), value)


def run_with(switches: Sequence[Switch], work: Callable[[], object]) -> None:
    """Run ``work`` with every switch at its value, and restore changed ones in any case."""
    changed: list[tuple[Switch, Any]] = []
    try:
        for switch in switches:
            before = switch.read()
            if before != switch.value:
                changed.append((switch, before))
                switch.write(switch.value)
        work()
    finally:
        for switch, before in reversed(changed):
            switch.write(before)
