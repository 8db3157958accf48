"""Snapshots as files that PyTorch's tools and `cudakit memviz` read."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cudakit.errors import UsageError
from cudakit.torch_rules.oom_facts import OomReport


class Saver:
    """Writes a snapshot when it is told that memory has run out; the latest one stays."""

    def __init__(
        self, snapshot: Callable[[], dict[str, Any]], path: str | os.PathLike[str]
    ) -> None:
        self._snapshot = snapshot
        self._path = checked(path)
        self.__qualname__ = "save_on_out_of_memory"

    def __call__(self, report: OomReport) -> None:
        del report  # the snapshot has all of it
        save(self._snapshot(), self._path)


def checked(path: str | os.PathLike[str]) -> Path:
    """Return where to write. Raises UsageError where that is no place for a file."""
    place = Path(path).absolute()  # the program may go elsewhere meanwhile
    if place.is_dir():
        raise UsageError(f"cannot write {place}: it is a directory", hint="give the name of a file")
    if not place.parent.is_dir():
        raise UsageError(
            f"cannot write {place}: there is no directory {place.parent}", hint="make it first"
        )
    return place


def save(snapshot: dict[str, Any], path: Path) -> None:
    """Write a snapshot, or leave what was there. Raises UsageError where it cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("wb") as file:
                pickle.dump(snapshot, file, protocol=4)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="give another place, or make room there"
        ) from error
