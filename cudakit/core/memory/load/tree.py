"""A file's builtin containers as a tree that is read by columns, never node by node.

A node is addressed by a handle: a positive integer that means something to its tree only; 0 is "not
there". Tuples are lists. Every operation takes and gives numpy arrays of handles, so that a million
dictionaries cost a few calls; the native tree (``reader/*.c``) answers them from flat memory,
ObjectTree from Python objects (JSON files, and pickles where the native reader was not built).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cudakit.errors import SnapshotError

Handles: TypeAlias = npt.NDArray[np.uint64]
_T = TypeVar("_T")

# Frames are dictionaries in a list: two levels. Deeper nodes are compared by identity.
_INTERN_DEPTH = 4


class Tree(Protocol):
    """The interface of a parsed file; see the module for what a handle is.

    Every method raises SnapshotError where a node is not of the kind asked for.
    """

    @property
    def root(self) -> int:
        """The handle of the outermost object."""

    def plain(self, handle: int) -> Any:
        """Build Python objects of a whole subtree: for small parts only.

        Raises SnapshotError when it has more items than the file has bytes (shared containers that
        multiply) or is nested deeper than 100.
        """

    def members(self, handle: int) -> dict[str, int]:
        """Map a dictionary's text keys to the handles of their values; other keys are ignored."""

    def is_list(self, handle: int) -> bool:
        """Return whether the node is a list or a tuple."""

    def children(self, lists: Handles) -> tuple[npt.NDArray[np.int64], Handles]:
        """Concatenate the items of lists: the number of items of each, and all items. 0 has none.

        Raises SnapshotError when there are more items than the file has bytes.
        """

    def column(self, dicts: Handles, key: str) -> Handles:
        """Look one key up in many dictionaries: 0 where it is absent."""

    def integers(self, handles: Handles) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Read integers of -2**63 to 2**64-1, and which nodes are such.

        The upper half wraps: view it as uint64. Booleans are 0 and 1. Whatever else, 0 included,
        is 0 and marked False.
        """

    def intern(self, handles: Handles) -> tuple[npt.NDArray[np.int32], Handles]:
        """Number nodes by content: an id for each, and for each id one node that has that content.

        Ids count from 0 in order of first appearance; handle 0 is a content of its own.
        """


class ObjectTree:
    """A Tree over Python objects: builtin scalars, lists, tuples and dicts only."""

    def __init__(self, root: object, size_bytes: int) -> None:
        self._objects: list[Any] = [None, root]
        self._size_bytes = size_bytes

    @property
    def root(self) -> int:
        return 1

    def plain(self, handle: int) -> Any:
        root = self._objects[handle]
        check_size(root, _items, self._size_bytes)
        return root

    def members(self, handle: int) -> dict[str, int]:
        found = self._objects[handle]
        if not isinstance(found, dict):
            raise wrong_kind("a dictionary", _kind(found))
        texts = {key: value for key, value in found.items() if isinstance(key, str)}
        return dict(zip(texts, self._add(list(texts.values())).tolist(), strict=True))

    def is_list(self, handle: int) -> bool:
        return isinstance(self._objects[handle], (list, tuple))

    def children(self, lists: Handles) -> tuple[npt.NDArray[np.int64], Handles]:
        found = [self._objects[i] if i else () for i in lists.tolist()]
        for item in found:
            if not isinstance(item, (list, tuple)):
                raise wrong_kind("a list", _kind(item))
        counts = np.fromiter(map(len, found), np.int64, len(found))
        if int(counts.sum()) > self._size_bytes:
            raise multiplied(self._size_bytes)
        return counts, self._add(list(chain.from_iterable(found)))

    def column(self, dicts: Handles, key: str) -> Handles:
        found = [self._objects[i] for i in dicts.tolist()]
        for item in found:
            if not isinstance(item, dict):
                raise wrong_kind("a dictionary", _kind(item))
        present = np.fromiter((key in item for item in found), np.bool_, len(found))
        return np.where(present, self._add([item.get(key) for item in found]), np.uint64(0))

    def integers(self, handles: Handles) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        found: list[Any] = [self._objects[i] if i else None for i in handles.tolist()]
        known = [isinstance(item, int) and -(1 << 63) <= item < 1 << 64 for item in found]
        values = (
            item & 0xFFFF_FFFF_FFFF_FFFF if good else 0
            for item, good in zip(found, known, strict=True)
        )
        wrapped = np.fromiter(values, np.uint64, len(found)).view(np.int64)
        return wrapped, np.array(known, np.bool_)

    def intern(self, handles: Handles) -> tuple[npt.NDArray[np.int32], Handles]:
        contents = _Contents()
        first: dict[object, int] = {}
        representatives: list[int] = []
        ids = np.empty(len(handles), np.int32)
        for row, handle in enumerate(handles.tolist()):
            key = contents.key(self._objects[handle]) if handle else ()
            known = first.setdefault(key, len(representatives))
            if known == len(representatives):
                representatives.append(handle)
            ids[row] = known
        return ids, np.array(representatives, np.uint64)

    def _add(self, objects: list[Any]) -> Handles:
        start = len(self._objects)
        self._objects.extend(objects)
        return np.arange(start, start + len(objects), dtype=np.uint64)


class _Contents:
    """Keys that are equal for objects of equal content; visits each container once for each depth."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._visited: dict[tuple[int, int], object] = {}

    def key(self, node: object, depth: int = 0) -> object:
        if not isinstance(node, (list, tuple, dict)):
            return _scalar_key(node)
        if depth == _INTERN_DEPTH:
            return ("identity", id(node))
        # Equality depends on the remaining depth, so each depth has its own keys.
        known = self._visited.get((id(node), depth))
        if known is None:
            known = self._visited[id(node), depth] = self._container(node, depth)
        return known

    def _container(self, node: Any, depth: int) -> object:
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
    # 1, 1.0 and True differ; floats are equal when their bits are, so that NaN equals itself.
    # Python hashes bytes under a secret key, but not integers: a file could choose large ones that
    # collide.
    if isinstance(node, float):
        return (float, struct.pack(">d", node))
    if isinstance(node, int) and node.bit_length() > 64:
        return (int, node.to_bytes(node.bit_length() // 8 + 1, "little", signed=True))
    return (type(node), node)


def check_size(root: _T, items: Callable[[_T], list[_T]], size_bytes: int) -> None:
    """Count a subtree before it is walked.

    Raises SnapshotError when it has more items than size_bytes or is nested deeper than 100.
    """
    level, left = [root], max(size_bytes, 1)
    for _ in range(100):
        below: list[_T] = []
        for node in level:
            below += items(node)
            if len(below) > left:
                raise multiplied(size_bytes)
        if not below:
            return
        level, left = below, left - len(below)
    raise SnapshotError("the file is nested deeper than 100 levels; no memory snapshot is")


def wrong_kind(wanted: str, found: str) -> SnapshotError:
    """Return the error for a node of another kind than the schema requires."""
    return SnapshotError(f"the file has {found} where a memory snapshot has {wanted}")


def multiplied(size_bytes: int) -> SnapshotError:
    """Return the error for containers that are shared so often that reading them would not end."""
    return SnapshotError(
        f"the file shares its lists so often that they expand to more than its {size_bytes:,} bytes"
    )


def _kind(node: object) -> str:
    names: dict[type, str] = {dict: "a dictionary", list: "a list", tuple: "a list", str: "text"}
    return names.get(type(node), type(node).__name__)


def _items(node: object) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return list(node) if isinstance(node, (list, tuple)) else []
