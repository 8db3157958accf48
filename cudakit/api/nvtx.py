"""Names for stretches of a program, for the tools that listen through NVTX.

The functions are those of ``cudakit.gpu.nvtx`` themselves, because an import in a function that forwards
to them would cost more than a range does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudakit.gpu.nvtx import mark, pop_range, push_range, range  # noqa: A004 the term of NVTX

__all__ = ["mark", "pop_range", "push_range", "range"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cudakit.gpu import nvtx

    return getattr(nvtx, name)
