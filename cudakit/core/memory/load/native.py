"""The Tree over the native machine: the queries of ``reader/*.c`` with numpy arrays.

Importing this fails where the native machine was not built.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.load._pickled import PickledTree
from cudakit.core.memory.load.machine import convert
from cudakit.core.memory.load.tree import Handles, check_size, multiplied, wrong_kind

# The native machine's names for nodes with items.
_LIST = "a list"
_DICTIONARY = "a dictionary"


class NativeTree:
    """The nodes that the native machine read.

    Raises ValueError(why, offset) for a file that it does not read, as the machine in Python does.
    """

    def __init__(self, content: bytes) -> None:
        self._nodes = PickledTree(content, os.urandom(16), _packed)
        self._size_bytes = len(content)

    @property
    def root(self) -> int:
        return self._nodes.root

    def plain(self, handle: int) -> Any:
        if self._nodes.kind(handle) in (_LIST, _DICTIONARY):
            check_size(handle, self._items, self._size_bytes)
        return self._object(handle)

    def _items(self, handle: int) -> list[int]:
        kind = self._nodes.kind(handle)
        if kind == _LIST:
            return list(self.children(np.array([handle], np.uint64))[1].tolist())
        return list(self._nodes.members(handle).values()) if kind == _DICTIONARY else []

    def _object(self, handle: int) -> Any:
        kind = self._nodes.kind(handle)
        if kind == _LIST:
            return [self._object(item) for item in self._items(handle)]
        if kind == _DICTIONARY:
            members = self._nodes.members(handle)
            return {key: self._object(value) for key, value in members.items()}
        return self._nodes.scalar(handle)

    def members(self, handle: int) -> dict[str, int]:
        with _wanting(_DICTIONARY):
            return self._nodes.members(handle)

    def is_list(self, handle: int) -> bool:
        return self._nodes.kind(handle) == _LIST

    def children(self, lists: Handles) -> tuple[npt.NDArray[np.int64], Handles]:
        lists = _aligned(lists)
        counts = np.empty(len(lists), np.int64)
        with _wanting(_LIST):
            self._nodes.lengths(lists, counts)
        if (total := int(counts.sum())) > self._size_bytes:
            raise multiplied(self._size_bytes)
        items = np.empty(total, np.uint64)
        self._nodes.gather(lists, items)
        return counts, items

    def column(self, dicts: Handles, key: str) -> Handles:
        found = np.empty(len(dicts), np.uint64)
        with _wanting(_DICTIONARY):
            self._nodes.column(_aligned(dicts), found, key)
        return found

    def integers(self, handles: Handles) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        numbers, known = np.empty(len(handles), np.int64), np.empty(len(handles), np.bool_)
        self._nodes.integers(_aligned(handles), numbers, known)
        return numbers, known

    def intern(self, handles: Handles) -> tuple[npt.NDArray[np.int32], Handles]:
        ids, nodes = np.empty(len(handles), np.int32), np.empty(len(handles), np.uint64)
        self._nodes.intern(_aligned(handles), ids, nodes)
        # A copy, so that the array of the length of the handles is freed.
        return ids, nodes[: int(ids.max(initial=-1)) + 1].copy()


def _aligned(handles: Handles) -> Handles:
    return np.require(handles, np.uint64, ["C_CONTIGUOUS", "ALIGNED"])


@contextmanager
def _wanting(kind: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise wrong_kind(kind, error.args[1]) from None


def _packed(opcode: int, raw: bytes) -> bool | float | str | bytes:
    """Convert for the native machine, which accepts integers as bytes in two's complement."""
    value = convert(opcode, raw)
    if isinstance(value, int) and not isinstance(value, bool):
        return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return value
