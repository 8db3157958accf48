"""Names for stretches of a program, for the tools that listen through NVTX."""

from __future__ import annotations

from cudakit.gpu.nvtx import mark, pop_range, push_range, range  # noqa: A004 the term of NVTX

__all__ = ["mark", "pop_range", "push_range", "range"]
