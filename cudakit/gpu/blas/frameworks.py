"""Row-major views of GEMM operands, and process-wide settings, for torch and CuPy.

Column-major memory read in row-major order is the transpose. D = op(A) op(B) is therefore computed as
Dᵀ = op(B)ᵀ op(A)ᵀ. The libraries swap the operands back, so that cuBLAS receives the same call.
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
    """The shape and the strides of an array, in elements. The batch dimension comes first."""

    element: Element
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size_bytes: int  # Bytes from the first element to the end of the operand.


@dataclass(frozen=True, slots=True)
class Views:
    """The operands of ``result`` (n by m) = ``left`` (n by k) @ ``right`` (k by m) + ``bias`` (m)."""

    left: View
    right: View
    result: View
    bias: View


def views(gemm: Gemm) -> Views:
    """Return row-major views of a GEMM's operands; ``bias`` is valid only if the epilogue has one."""
    bias = View(gemm.bias, (gemm.m,), (1,), gemm.m * gemm.bias.size_bytes)
    return Views(
        left=_view(gemm.b, (gemm.n, gemm.k), is_transposed=gemm.layout[1] == "t"),
        right=_view(gemm.a, (gemm.k, gemm.m), is_transposed=gemm.layout[0] == "t"),
        result=_view(gemm.d, (gemm.n, gemm.m), is_transposed=False),
        bias=bias,
    )


def _view(matrix: Matrix, shape: tuple[int, int], *, is_transposed: bool) -> View:
    strides = (1, matrix.leading) if is_transposed else (matrix.leading, 1)
    if matrix.batch == 1:
        return View(matrix.element, shape, strides, matrix.size_bytes)
    return View(
        matrix.element, (matrix.batch, *shape), (matrix.stride, *strides), matrix.size_bytes
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """A process-wide setting of a library, and the value that a GEMM requires."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    value: Any


def attribute_setting(owner: Any, name: str, value: Any) -> Setting:
    """Return the setting for an attribute of an object."""
    return Setting(partial(getattr, owner, name), partial(setattr, owner, name), value)


def run_with(settings: Sequence[Setting], work: Callable[[], object]) -> None:
    """Run ``work`` with all settings applied, and restore the previous values afterwards."""
    changed_settings: list[tuple[Setting, Any]] = []
    try:
        for setting in settings:
            previous_value = setting.read()
            if previous_value != setting.value:
                changed_settings.append((setting, previous_value))
                setting.write(setting.value)
        work()
    finally:
        for setting, previous_value in reversed(changed_settings):
            setting.write(previous_value)
