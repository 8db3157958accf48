"""The content of a file as a tree of nodes, which is queried by column: many nodes in one call.

A handle is a positive integer that names a node of one tree; 0 means that there is no node. Tuples are lists.
The queries take and return numpy arrays of handles, so that a million dictionaries need only a few calls.
NativeTree (``reader/*.c``) answers the queries from flat memory, ObjectTree from Python objects: of JSON
files, and of pickles if the compiled reader is missing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.snapshot import Ids, Ints, Mask
from cudakit.errors import SnapshotError

Handles: TypeAlias = npt.NDArray[np.uint64]
_T = TypeVar("_T")

# A call stack is a list of dictionaries: two levels. Nodes below this depth are compared by identity.
_INTERN_DEPTH = 4


class Tree(Protocol):
    """A parsed file. Every method raises SnapshotError if a node is of the wrong kind."""

    @property
    def root(self) -> int:
        """The handle of the outermost object."""

    def plain(self, handle: int) -> Any:
        """Return a subtree as Python objects; for small subtrees only.

        Raises SnapshotError if the subtree is nested deeper than 100 levels, or has more items than the file
        has bytes, because containers are shared.
        """

    def members(self, handle: int) -> dict[str, int]:
        """Return the text keys of a dictionary, with the handles of their values."""

    def is_list(self, handle: int) -> bool:
        """Return whether the node is a list or a tuple."""

    def children(self, lists: Handles) -> tuple[Ints, Handles]:
        """Return the length of each list, and the items of all lists, concatenated; handle 0 is empty.

        Raises SnapshotError if there are more items than the file has bytes.
        """

    def column(self, dicts: Handles, key: str) -> Handles:
        """Return the value of a key in each dictionary; 0 if the dictionary lacks the key."""

    def integers(self, handles: Handles) -> tuple[Ints, Mask]:
        """Return integers of -2**63 to 2**64-1, and which nodes are such integers.

        Values from 2**63 on wrap: view them as uint64. Booleans are 0 and 1. All other nodes, and handle 0,
        are 0 and not integers.
        """

    def intern(self, handles: Handles) -> tuple[Ids, Handles]:
        """Return an id per node, equal for nodes of equal content, and one node per id.

        Ids count from 0 in the order of their first nodes; handle 0 has its own id.
        """


class ObjectTree:
    """A Tree of Python objects: scalars, lists, tuples and dicts."""

    def __init__(self, root: object, size_bytes: int) -> None:
        self._objects: list[Any] = [None, root]
        self._size_bytes = size_bytes

    @property
    def root(self) -> int:
        return 1

    def plain(self, handle: int) -> Any:
        root = self._objects[handle]
        check_subtree(root, _items, self._size_bytes)
        return root

    def members(self, handle: int) -> dict[str, int]:
        node = self._objects[handle]
        if not isinstance(node, dict):
            raise kind_error("a dictionary", _kind_name(node))
        texts = {key: value for key, value in node.items() if isinstance(key, str)}
        return dict(zip(texts, self._add(list(texts.values())).tolist(), strict=True))

    def is_list(self, handle: int) -> bool:
        return isinstance(self._objects[handle], (list, tuple))

    def children(self, lists: Handles) -> tuple[Ints, Handles]:
        objects = [self._objects[i] if i else () for i in lists.tolist()]
        for item in objects:
            if not isinstance(item, (list, tuple)):
                raise kind_error("a list", _kind_name(item))
        counts = np.fromiter(map(len, objects), np.int64, len(objects))
        if int(counts.sum()) > self._size_bytes:
            raise expansion_error(self._size_bytes)
        return counts, self._add(list(chain.from_iterable(objects)))

    def column(self, dicts: Handles, key: str) -> Handles:
        objects = [self._objects[i] for i in dicts.tolist()]
        for item in objects:
            if not isinstance(item, dict):
                raise kind_error("a dictionary", _kind_name(item))
        present = np.fromiter((key in item for item in objects), np.bool_, len(objects))
        return np.where(present, self._add([item.get(key) for item in objects]), np.uint64(0))

    def integers(self, handles: Handles) -> tuple[Ints, Mask]:
        objects: list[Any] = [self._objects[i] if i else None for i in handles.tolist()]
        is_integer = [isinstance(item, int) and -(1 << 63) <= item < 1 << 64 for item in objects]
        values = (
            item & 0xFFFF_FFFF_FFFF_FFFF if valid else 0
            for item, valid in zip(objects, is_integer, strict=True)
        )
        wrapped = np.fromiter(values, np.uint64, len(objects)).view(np.int64)
        return wrapped, np.array(is_integer, np.bool_)

    def intern(self, handles: Handles) -> tuple[Ids, Handles]:
        contents = _ContentKeys()
        id_by_key: dict[object, int] = {}
        representatives: list[int] = []
        ids = np.empty(len(handles), np.int32)
        for row, handle in enumerate(handles.tolist()):
            key = contents.key(self._objects[handle]) if handle else ()
            node_id = id_by_key.setdefault(key, len(representatives))
            if node_id == len(representatives):
                representatives.append(handle)
            ids[row] = node_id
        return ids, np.array(representatives, np.uint64)

    def _add(self, objects: list[Any]) -> Handles:
        start = len(self._objects)
        self._objects.extend(objects)
        return np.arange(start, start + len(objects), dtype=np.uint64)


class _ContentKeys:
    """Hashable keys that are equal for objects of equal content. Visits each container once per depth."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._visited: dict[tuple[int, int], object] = {}

    def key(self, node: object, depth: int = 0) -> object:
        if not isinstance(node, (list, tuple, dict)):
            return _scalar_key(node)
        if depth == _INTERN_DEPTH:
            return ("identity", id(node))
        # Below _INTERN_DEPTH nodes are compared by identity, so a key is valid for one depth only.
        content_key = self._visited.get((id(node), depth))
        if content_key is None:
            content_key = self._visited[id(node), depth] = self._container_key(node, depth)
        return content_key

    def _container_key(self, node: Any, depth: int) -> object:
        parts: object
        if isinstance(node, dict):
            parts = frozenset(
                (key, self.key(value, depth + 1))
                for key, value in node.items()
                if isinstance(key, str)
            )
        else:
            parts = tuple(self.key(item, depth + 1) for item in node)
        return (type(node) is dict, self._numbers.setdefault(parts, len(self._numbers)))


def _scalar_key(node: object) -> object:
    # 1, 1.0 and True differ. Floats are equal if their bits are, so that NaN equals itself. Large integers
    # are keyed as bytes: Python's hash of bytes is keyed, but a file could choose integers with colliding
    # hashes.
    if isinstance(node, float):
        return (float, struct.pack(">d", node))
    if isinstance(node, int) and node.bit_length() > 64:
        return (int, node.to_bytes(node.bit_length() // 8 + 1, "little", signed=True))
    return (type(node), node)


def check_subtree(root: _T, items: Callable[[_T], list[_T]], size_bytes: int) -> None:
    """Raise SnapshotError if a subtree has more items than ``size_bytes``, or more than 100 levels."""
    level, remaining = [root], max(size_bytes, 1)
    for _ in range(100):
        next_level: list[_T] = []
        for node in level:
            next_level += items(node)
            if len(next_level) > remaining:
                raise expansion_error(size_bytes)
        if not next_level:
            return
        level, remaining = next_level, remaining - len(next_level)
    raise SnapshotError("the file is nested deeper than 100 levels; no memory snapshot is")


def kind_error(expected: str, actual: str) -> SnapshotError:
    """Return the error for a node of the wrong kind."""
    return SnapshotError(f"the file has {actual} where a memory snapshot has {expected}")


def expansion_error(size_bytes: int) -> SnapshotError:
    """Return the error for a file whose shared containers expand to too many items."""
    return SnapshotError(
        f"the file shares its lists so often that they expand to more than its {size_bytes:,} bytes"
    )


def _kind_name(node: object) -> str:
    names: dict[type, str] = {dict: "a dictionary", list: "a list", tuple: "a list", str: "text"}
    return names.get(type(node), type(node).__name__)


def _items(node: object) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return list(node) if isinstance(node, (list, tuple)) else []
