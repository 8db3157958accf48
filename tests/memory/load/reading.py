"""Comparable forms of a Snapshot, for the tests of loading."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from memory.load import files

from cudakit.memory.snapshot import DeviceTrace, Snapshot
from cudakit.stacks import Frame

# The types of the fixtures ``loaded`` and ``refused``.
Loader: TypeAlias = Callable[..., Snapshot]
Refused: TypeAlias = Callable[[Any], str]

TOP = 2**64 - 1


def content(value: Any) -> Any:
    """Return all columns with their types, comparable."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, Frame):
        names = (field.name for field in dataclasses.fields(value))
        return {name: content(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [content(item) for item in value]
    return value


def said(snapshot: Snapshot) -> Any:
    """Return the content of a Snapshot without the file's name, format and size."""
    return content(dataclasses.replace(snapshot, source="", format="", size_bytes=0))


def only(snapshot: Snapshot) -> DeviceTrace:
    """Return the only device of a snapshot."""
    (device,) = snapshot.devices
    return device


def stack(snapshot: Snapshot, index: int) -> list[str]:
    """Return the function names of a stack."""
    return [snapshot.frames[i].name for i in snapshot.stacks[index]]


def untraced(**more: Any) -> dict[str, Any]:
    """Return a snapshot without traces, with the given keys."""
    return {"segments": files.segments(), "device_traces": []} | more
