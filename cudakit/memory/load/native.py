"""The Tree of the compiled reader, ``reader/*.c``, with numpy arrays.

The import fails if the package was installed without a C compiler.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cudakit.memory.load._pickled import PickledTree
from cudakit.memory.load.arguments import convert_argument
from cudakit.memory.load.limits import MAX_KEYS, Budget
from cudakit.memory.load.tree import Handles, check_subtree, keys_error, kind_error
from cudakit.memory.snapshot import Ids, Ints, Mask

# Return values of ``PickledTree.kind``.
_LIST_KIND = "a list"
_DICTIONARY_KIND = "a dictionary"


class NativeTree:
    """A Tree in flat memory, built by the compiled pickle machine.

    Raises ValueError(reason word, offset) if the file is rejected, as ``Machine.run`` does.
    """

    def __init__(self, content: bytes, budget: Budget) -> None:
        self._nodes = PickledTree(
            content, os.urandom(16), _convert_for_native, budget.tree_bytes, MAX_KEYS
        )
        self.budget = budget

    @property
    def root(self) -> int:
        return self._nodes.root

    def plain_object(self, handle: int) -> Any:
        if self._nodes.kind(handle) in (_LIST_KIND, _DICTIONARY_KIND):
            check_subtree(handle, self._nodes.length, self._child_handles)
        return self._plain_value(handle)

    def texts(self, handles: Handles) -> list[str]:
        return self._nodes.texts(_aligned(handles))

    def _child_handles(self, handle: int) -> list[int]:
        node_kind = self._nodes.kind(handle)
        if node_kind == _LIST_KIND:
            items = np.empty(self._nodes.length(handle), np.uint64)
            self._nodes.gather(np.array([handle], np.uint64), items)
            return list(items.tolist())
        return list(self._nodes.members(handle).values()) if node_kind == _DICTIONARY_KIND else []

    def _plain_value(self, handle: int) -> Any:
        node_kind = self._nodes.kind(handle)
        if node_kind == _LIST_KIND:
            return [self._plain_value(child_handle) for child_handle in self._child_handles(handle)]
        if node_kind == _DICTIONARY_KIND:
            members = self._nodes.members(handle)
            return {key: self._plain_value(value) for key, value in members.items()}
        return self._nodes.scalar(handle)

    def members(self, handle: int) -> dict[str, int]:
        with _raise_kind_errors(_DICTIONARY_KIND):
            return self._nodes.members(handle)

    def is_list(self, handle: int) -> bool:
        return self._nodes.kind(handle) == _LIST_KIND

    def children(self, lists: Handles) -> tuple[Ints, Handles]:
        lists = _aligned(lists)
        counts = np.empty(len(lists), np.int64)
        with _raise_kind_errors(_LIST_KIND):
            self._nodes.lengths(lists, counts)
        item_count = int(counts.sum())
        self.budget.spend_items(item_count)
        items = np.empty(item_count, np.uint64)
        self._nodes.gather(lists, items)
        return counts, items

    def column(self, dicts: Handles, key: str) -> Handles:
        values = np.empty(len(dicts), np.uint64)
        with _raise_kind_errors(_DICTIONARY_KIND):
            self._nodes.column(_aligned(dicts), values, key)
        return values

    def integers(self, handles: Handles) -> tuple[Ints, Mask]:
        numbers, is_integer = np.empty(len(handles), np.int64), np.empty(len(handles), np.bool_)
        self._nodes.integers(_aligned(handles), numbers, is_integer)
        return numbers, is_integer

    def intern(self, handles: Handles) -> tuple[Ids, Handles]:
        ids, nodes = np.empty(len(handles), np.int32), np.empty(len(handles), np.uint64)
        self._nodes.intern(_aligned(handles), ids, nodes)
        # The copy lets the larger array be freed.
        return ids, nodes[: int(ids.max(initial=-1)) + 1].copy()


def _aligned(handles: Handles) -> Handles:
    return np.require(handles, np.uint64, ["C_CONTIGUOUS", "ALIGNED"])


@contextmanager
def _raise_kind_errors(kind: str) -> Iterator[None]:
    """Raise SnapshotError if a node is not of a kind."""
    try:
        yield
    except ValueError as error:
        reason, kind_of_node = error.args
        raise (keys_error() if reason == "keys" else kind_error(kind, kind_of_node)) from None


def _convert_for_native(opcode: int, argument_bytes: bytes) -> bool | float | str | bytes:
    """Return an argument's value; integers as bytes in two's complement, as ``push_object`` expects."""
    argument = convert_argument(opcode, argument_bytes)
    if isinstance(argument, int) and not isinstance(argument, bool):
        return argument.to_bytes(argument.bit_length() // 8 + 1, "little", signed=True)
    return argument
