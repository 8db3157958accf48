"""Parts of the tables of a report: names, stacks, and tables limited to a number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from cudakit.core.memory.result import DeviceMemory
from cudakit.document import Column, Frame, Stack, Table, Text, Value

_T = TypeVar("_T")

NO_STACK = "no stack recorded (C++ thread, or before the trace)"


def device_name(device: DeviceMemory) -> str:
    """Return the name of a device as CUDA programs write it."""
    return "pinned host memory" if device.device is None else f"cuda:{device.device}"


def moment_name(device: DeviceMemory) -> str:
    """Return the words for the moment of the tables."""
    at = device.at
    return {"peak": "at the peak", "end": "at the end", "oom": "when it ran out"}.get(
        at.name, f"after event {at.event:,}"
    )


def pool_name(pool: tuple[int, int]) -> str:
    """Return the name of a pool: (0, 0) is the default pool, (n, 0) a graph's, (0, n) a MemPool's."""
    if pool == (0, 0):
        return "default"
    return f"graph {pool[0]},{pool[1]}" if pool[0] else f"user {pool[0]},{pool[1]}"


def stack_value(frames: tuple[Frame, ...], site: int) -> Value:
    """Return a stack, or the text for a missing one."""
    return Stack(frames, site) if frames else Text(NO_STACK)


def limited(
    names: tuple[str, str],
    columns: tuple[Column, ...],
    items: Sequence[_T],
    row: Callable[[_T], tuple[Value, ...]],
    top: int,
) -> Table:
    """Return a table of the first ``top`` items, 0 for all, with the number of rows left out."""
    shown = items if top == 0 else items[:top]
    caption = left_out(len(items) - len(shown), *names)
    return Table(columns, tuple(row(item) for item in shown), caption)


def left_out(n: int, one: str, many: str) -> str:
    """Return the caption for rows left out of a table; "" if there are none."""
    return f"{n:,} more {one if n == 1 else many}: --top 0 shows all" if n else ""
