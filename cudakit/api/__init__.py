"""The Python calls that users make: each a command without its terminal, or a word to the GPU."""

from __future__ import annotations

from cudakit.api import profiler

__all__ = ["profiler"]
