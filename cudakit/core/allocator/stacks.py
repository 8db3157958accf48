"""Stacks: from code objects and offsets to frames with lines."""

from __future__ import annotations

from bisect import bisect_right
from types import CodeType
from typing import TypeAlias, cast

from cudakit.core.allocator.block import Trail

Frames: TypeAlias = "list[dict[str, str | int]]"


class Stacks:
    """Finds frames; what it has found once, it gives again, so that equal stacks are one object."""

    def __init__(self) -> None:
        self._stacks: dict[Trail, Frames] = {}
        self._frames: dict[tuple[CodeType, int], dict[str, str | int]] = {}
        self._lines: dict[CodeType, tuple[list[int], list[int]]] = {}

    def frames(self, trail: Trail | None) -> Frames:
        """Return the frames of a stack as PyTorch writes them, innermost first."""
        if not trail:
            return []
        found = self._stacks.get(trail)
        if found is None:
            pairs = zip(trail[::2], trail[1::2], strict=True)
            found = [self._frame(*cast("tuple[CodeType, int]", pair)) for pair in pairs]
            self._stacks[trail] = found
        return found

    def _frame(self, code: CodeType, offset: int) -> dict[str, str | int]:
        found = self._frames.get((code, offset))
        if found is None:
            line = self._line(code, offset)
            found = {"name": code.co_name, "filename": code.co_filename, "line": line}
            self._frames[code, offset] = found
        return found

    def _line(self, code: CodeType, offset: int) -> int:
        if code not in self._lines:
            rows = [(start, line or 0) for start, _, line in code.co_lines()]
            self._lines[code] = [start for start, _ in rows], [line for _, line in rows]
        starts, lines = self._lines[code]
        return lines[bisect_right(starts, offset) - 1] if offset >= 0 else code.co_firstlineno
