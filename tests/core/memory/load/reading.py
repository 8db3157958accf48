"""What the tests of loading share: how to look at a Snapshot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from core.memory.load import files

from cudakit.core.memory.snapshot import DeviceTrace, Snapshot
from cudakit.document import Frame

# The types of the fixtures ``loaded`` and ``refused``.
Loader: TypeAlias = Callable[..., Snapshot]
Refused: TypeAlias = Callable[[Any], str]

TOP = 2**64 - 1


def content(value: Any) -> Any:
    """Reduce to what can be compared: every column, with its type."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, Frame):
        names = (field.name for field in dataclasses.fields(value))
        return {name: content(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [content(item) for item in value]
    return value


def said(snapshot: Snapshot) -> Any:
    """Reduce to what the file says, whatever its name, form and size."""
    return content(dataclasses.replace(snapshot, source="", format="", size_bytes=0))


def only(snapshot: Snapshot) -> DeviceTrace:
    """Take the one device that a snapshot has."""
    (device,) = snapshot.devices
    return device


def stack(snapshot: Snapshot, index: int) -> list[str]:
    """Name the functions of a stack."""
    return [snapshot.frames[i].name for i in snapshot.stacks[index]]


def untraced(**more: Any) -> dict[str, Any]:
    """Make a snapshot of nothing but segments, and what is given."""
    return {"segments": files.segments(), "device_traces": []} | more
