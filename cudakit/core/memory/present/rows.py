"""What the tables of the report are made of: names, stacks, and rows cut to the first few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from cudakit.core.memory.result import DeviceMemory
from cudakit.document import Column, Frame, Stack, Table, Text, Value

_T = TypeVar("_T")

NO_STACK = "no stack recorded (C++ thread, or before the trace)"


def device_name(device: DeviceMemory) -> str:
    """Name a device as CUDA programs do."""
    return "pinned host memory" if device.device is None else f"cuda:{device.device}"


def moment_name(device: DeviceMemory) -> str:
    """Say of which moment the tables speak."""
    at = device.at
    return {"peak": "at the peak", "end": "at the end", "oom": "when it ran out"}.get(
        at.name, f"after event {at.event:,}"
    )


def pool_name(pool: tuple[int, int]) -> str:
    """Name a pool: (0, 0) is the default one, a first number is a graph's, a second a MemPool's."""
    if pool == (0, 0):
        return "default"
    return f"graph {pool[0]},{pool[1]}" if pool[0] else f"user {pool[0]},{pool[1]}"


def stack_value(frames: tuple[Frame, ...], site: int) -> Value:
    """Show a stack, or say that there is none."""
    return Stack(frames, site) if frames else Text(NO_STACK)


def limited(
    names: tuple[str, str],
    columns: tuple[Column, ...],
    items: Sequence[_T],
    row: Callable[[_T], tuple[Value, ...]],
    top: int,
) -> Table:
    """Make a table of the first ``top`` items, 0 for all, and say how many are left out."""
    shown = items if top == 0 else items[:top]
    caption = left_out(len(items) - len(shown), *names)
    return Table(columns, tuple(row(item) for item in shown), caption)


def left_out(n: int, one: str, many: str) -> str:
    """Say how many rows a table does not show; nothing where it shows all."""
    return f"{n:,} more {one if n == 1 else many}: --top 0 shows all" if n else ""
