"""The content of a file as a tree of nodes, which is queried by column: many nodes in one call.

A handle is a positive integer that names a node of one tree; 0 means that there is no node. Tuples are lists.
The queries take and return numpy arrays of handles, so that a million dictionaries need only a few calls.
NativeTree (``native/pickled/*.c``) answers the queries from flat memory, ObjectTree from Python objects: of
JSON files, and of pickles if the compiled reader is missing.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cudakit.errors import SnapshotError
from cudakit.input_files import ExpectedFile
from cudakit.memory.snapshot import Ids, Ints, Mask
from cudakit.units import MIB

Handles: TypeAlias = npt.NDArray[np.uint64]
_T = TypeVar("_T")

# A call stack is a list of dictionaries: two levels. Nodes below this depth are compared by identity.
_INTERN_DEPTH = 4

# Number of arrays of handles whose nodes are stored: the trace entries, one of their columns, and one more.
_MAX_RECENT_ROWS = 3


class Tree(Protocol):
    """A parsed file. Every method raises SnapshotError if a node is of the wrong kind.

    No method expands a shared container more often than the budget of the file allows.
    """

    @property
    def root(self) -> int:
        """The handle of the outermost object."""

    @property
    def budget(self) -> Budget:
        """The budget of the file."""

    def plain_object(self, handle: int) -> Any:
        """Return a subtree as Python objects; for small subtrees only.

        Raises SnapshotError if the subtree is nested deeper than 100 levels, or has more than 10,000 items.
        """

    def texts(self, handles: Handles) -> list[str]:
        """Return the text of each node; the empty text for any other node, and for handle 0."""

    def members(self, handle: int) -> dict[str, int]:
        """Return the text keys of a dictionary, with the handles of their values.

        Raises SnapshotError if the dictionary has more than 10,000 keys.
        """

    def is_list(self, handle: int) -> bool:
        """Return whether the node is a list or a tuple."""

    def children(self, lists: Handles) -> tuple[Ints, Handles]:
        """Return the length of each list, and the concatenated items of all lists; handle 0 is an empty list.

        Raises SnapshotError if the calls for a file return more items than its budget has.
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


# The value of a key that a dictionary lacks.
_MISSING_VALUE: Any = object()


class ObjectTree:
    """A Tree of Python objects: scalars, lists, tuples and dicts.

    The queries avoid Python loops over rows where map() and list methods can do the same.
    """

    def __init__(self, root: object, budget: Budget) -> None:
        self._objects: list[Any] = [None, root]
        # Arrays of handles with their nodes, by the id of the array. Most queries are about the same
        # dictionaries as an earlier query, or about the result of the query before.
        self._recent_rows: dict[int, tuple[Handles, list[Any]]] = {}
        self.budget = budget

    @property
    def root(self) -> int:
        return 1

    def plain_object(self, handle: int) -> Any:
        root = self._objects[handle]
        check_subtree(root, _node_length, _child_nodes)
        return root

    def texts(self, handles: Handles) -> list[str]:
        return [node if isinstance(node, str) else "" for node in self._rows(handles)]

    def members(self, handle: int) -> dict[str, int]:
        node = self._objects[handle]
        if not isinstance(node, dict):
            raise kind_error("a dictionary", _kind_name(node))
        if len(node) > MAX_KEYS:
            raise keys_error()
        value_by_text = {key: value for key, value in node.items() if isinstance(key, str)}
        return dict(
            zip(
                value_by_text, self._add_objects(list(value_by_text.values())).tolist(), strict=True
            )
        )

    def is_list(self, handle: int) -> bool:
        return isinstance(self._objects[handle], (list, tuple))

    def children(self, lists: Handles) -> tuple[Ints, Handles]:
        rows = self._rows(lists)
        if not lists.all():
            rows = [
                node if handle else () for node, handle in zip(rows, lists.tolist(), strict=True)
            ]
        _check_types(rows, {list, tuple}, "a list")
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        self.budget.spend_items(int(counts.sum()))
        return counts, self._add_objects(list(chain.from_iterable(rows)))

    def column(self, dicts: Handles, key: str) -> Handles:
        rows = self._rows(dicts)
        _check_types(rows, {dict}, "a dictionary")
        values = [node.get(key, _MISSING_VALUE) for node in rows]
        missing_count = values.count(_MISSING_VALUE)
        if missing_count == len(values):
            return np.zeros(len(values), np.uint64)
        handles = self._add_objects(values)
        if missing_count:
            is_missing = (value is _MISSING_VALUE for value in values)
            handles[np.fromiter(is_missing, np.bool_, len(values))] = 0
        else:
            self._store_rows(handles, values)
        return handles

    def integers(self, handles: Handles) -> tuple[Ints, Mask]:
        rows = self._rows(handles)
        if set(map(type, rows)) <= {int, bool} and handles.all():
            with suppress(OverflowError):
                return np.array(rows, np.int64), np.ones(len(rows), np.bool_)
        is_integer = [isinstance(node, int) and -(1 << 63) <= node < 1 << 64 for node in rows]
        values = (
            node & 0xFFFF_FFFF_FFFF_FFFF if is_valid else 0
            for node, is_valid in zip(rows, is_integer, strict=True)
        )
        wrapped_values = np.fromiter(values, np.uint64, len(rows)).view(np.int64)
        return wrapped_values, np.array(is_integer, np.bool_)

    def intern(self, handles: Handles) -> tuple[Ids, Handles]:
        content_keys = _ContentKeys()
        rows = self._rows(handles)
        # Rows often share objects: the content of each object is computed once.
        number_by_address = {
            address: content_keys.number_of_content(node)
            for address, node in {id(node): node for node in rows}.items()
        }
        numbers = np.fromiter((number_by_address[id(node)] for node in rows), np.int64, len(rows))
        numbers[handles == 0] = -1
        _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
        # np.unique sorts by number; ids count in the order of the first nodes.
        id_of_number = np.empty(len(first), np.int32)
        id_of_number[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
        return id_of_number[inverse], handles[np.sort(first)]

    def _rows(self, handles: Handles) -> list[Any]:
        """Return the nodes of handles; None for handle 0."""
        _, rows = self._recent_rows.pop(id(handles), (handles, None))
        if rows is None:
            rows = list(map(self._objects.__getitem__, handles.tolist()))
        self._store_rows(handles, rows)
        return rows

    def _store_rows(self, handles: Handles, rows: list[Any]) -> None:
        self._recent_rows[id(handles)] = handles, rows
        if len(self._recent_rows) > _MAX_RECENT_ROWS:
            del self._recent_rows[next(iter(self._recent_rows))]

    def _add_objects(self, objects: list[Any]) -> Handles:
        first_handle = len(self._objects)
        self._objects.extend(objects)
        return np.arange(first_handle, first_handle + len(objects), dtype=np.uint64)


def _check_types(nodes: list[Any], types: set[type], expected_name: str) -> None:
    if not set(map(type, nodes)) <= types:
        raise kind_error(
            expected_name, _kind_name(next(node for node in nodes if type(node) not in types))
        )


class _ContentKeys:
    """Numbers that are equal for objects of equal content. Visits each container once per depth."""

    def __init__(self) -> None:
        self._number_by_key: dict[object, int] = {}
        self._number_by_container: dict[tuple[int, int], int] = {}
        # The number of each list, by depth and by the addresses of its items, which a file cannot choose.
        self._number_by_list: tuple[dict[tuple[int, ...], int], ...] = tuple(
            {} for _ in range(_INTERN_DEPTH)
        )

    def number_of_content(self, node: object, depth: int = 0) -> int:
        """Return the number of an object's content."""
        if type(node) is list and depth < _INTERN_DEPTH:
            addresses = tuple(map(id, node))
            if addresses not in self._number_by_list[depth]:
                self._number_by_list[depth][addresses] = self._number_of_container(node, depth)
            return self._number_by_list[depth][addresses]
        if not isinstance(node, (list, tuple, dict)):
            return self._number_of_key(_scalar_key(node))
        if depth == _INTERN_DEPTH:
            return self._number_of_key(("identity", id(node)))
        return self._number_of_container(node, depth)

    def _number_of_container(self, node: Any, depth: int) -> int:
        # Below _INTERN_DEPTH nodes are compared by identity, so a number is valid for one depth only.
        number = self._number_by_container.get((id(node), depth))
        if number is None:
            number = self._number_of_key(self._container_key(node, depth))
            self._number_by_container[id(node), depth] = number
        return number

    def _number_of_key(self, key: object) -> int:
        return self._number_by_key.setdefault(key, len(self._number_by_key))

    def _container_key(self, node: Any, depth: int) -> object:
        # Keys are bytes, because Python's hash of bytes is keyed: a file can choose numbers so that the
        # hashes of tuples collide.
        if isinstance(node, dict):
            text_keys = sorted(key for key in node if isinstance(key, str))
            numbers = (
                self.number_of_content(key_or_value, depth + 1)
                for key in text_keys
                for key_or_value in (key, node[key])
            )
            return ("dictionary", array("Q", numbers).tobytes())
        return array("Q", (self.number_of_content(child, depth + 1) for child in node)).tobytes()


def _scalar_key(node: object) -> object:
    # 1, 1.0 and True differ. Floats are equal if their bits are, so that NaN equals itself. Large integers
    # are keyed as bytes: Python's hash of bytes is keyed, but a file could choose integers with colliding
    # hashes.
    if isinstance(node, float):
        return (float, struct.pack(">d", node))
    if isinstance(node, int) and node.bit_length() > 64:
        return (int, node.to_bytes(node.bit_length() // 8 + 1, "little", signed=True))
    return (type(node), node)


def check_subtree(
    root: _T, length_of: Callable[[_T], int], items_of: Callable[[_T], list[_T]]
) -> None:
    """Raise SnapshotError if a subtree has more than 10,000 items, or more than 100 levels."""
    level_nodes, remaining_items = [root], MAX_PLAIN_ITEMS
    for _ in range(100):
        next_level_nodes: list[_T] = []
        for node in level_nodes:
            remaining_items -= length_of(node)
            if remaining_items < 0:
                raise SnapshotError(
                    f"the settings of the file have more than {MAX_PLAIN_ITEMS:,} values"
                )
            next_level_nodes += items_of(node)
        if not next_level_nodes:
            return
        level_nodes = next_level_nodes
    raise SnapshotError("the file is nested deeper than 100 levels; no memory snapshot is")


def keys_error() -> SnapshotError:
    """Return the error for a dictionary with too many keys."""
    return SnapshotError(f"a dictionary has more than {MAX_KEYS:,} keys; none of a snapshot has")


def kind_error(expected_name: str, actual_kind: str) -> SnapshotError:
    """Return the error for a node of the wrong kind."""
    name_by_type = {
        "int": "an integer",
        "float": "a number",
        "bool": "True or False",
        "NoneType": "None",
    }
    return SnapshotError(
        f"the file has {name_by_type.get(actual_kind, actual_kind)}"
        f" where a memory snapshot has {expected_name}"
    )


def _kind_name(node: object) -> str:
    name_by_type: dict[type, str] = {
        dict: "a dictionary",
        list: "a list",
        tuple: "a list",
        str: "text",
    }
    return name_by_type.get(type(node), type(node).__name__)


def _node_length(node: object) -> int:
    return len(node) if isinstance(node, (list, tuple, dict)) else 0


def _child_nodes(node: object) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return list(node) if isinstance(node, (list, tuple)) else []


# --- Limits of the memory and the time that one snapshot file can cost -----------------------------
#
# A small file can describe a large snapshot: compression repeats bytes, and a pickle can use one list or
# dictionary many times. So a file gets one budget for all of its devices and tables, in proportion to its
# size. In real snapshots an event takes 7 bytes of a compressed file and 70 of a pickle, or more; analyzing
# it needs about 300 bytes and 2 microseconds. A file of 5 MB is analyzed within 10 seconds and 1.5 GB.


# A dictionary of a snapshot has at most about 40 keys, and the settings about 40 values.
MAX_KEYS = 10_000
MAX_PLAIN_ITEMS = 10_000


SNAPSHOT_FILE = ExpectedFile(
    "a memory snapshot",
    "write a snapshot with: cudakit run --memory PROGRAM, "
    "or torch.cuda.memory._dump_snapshot('snapshot.pkl')",
)


class NotASnapshotError(SnapshotError):
    """The content of a file is not that of a snapshot; the message is the reason, without the file name."""


_BUDGETED = ("rows", "items", "frames", "characters")


class Budget:
    """The rows, list items, frames, characters and bytes that one file may still use.

    A row is an event, segment, block, annotation, or a distinct frame, text or pool. Every method raises
    SnapshotError if its budget is exceeded.
    """

    def __init__(
        self, file_bytes: int, content_bytes: int, memory_bytes: int | None = None
    ) -> None:
        # The maximum of rows, items, frames and characters.
        by_content = (
            10_000 + content_bytes // 8,
            10_000 + content_bytes,
            10_000 + content_bytes,
            MIB + 200 * content_bytes,
        )
        by_file = (
            1_000_000 + file_bytes // 4,
            2_000_000 + file_bytes // 2,
            500_000 + file_bytes // 8,
            64 * MIB + 20 * file_bytes,
        )
        self._remaining = dict(zip(_BUDGETED, map(min, by_content, by_file), strict=True))
        is_compressed = content_bytes != file_bytes
        self._size_text = f"{file_bytes:,} bytes"
        if is_compressed:
            self._size_text += f", {content_bytes:,} decompressed"
        # Decompressing the file raises only the limits by its size.
        self._decompressing_helps = is_compressed and any(
            file_limit < content_limit
            for file_limit, content_limit in zip(by_file, by_content, strict=True)
        )
        max_memory_bytes = memory_share(memory_bytes)
        # Python objects of an uncompressed snapshot take at most 20 bytes per byte.
        self._max_object_bytes = min(768 * MIB + 64 * file_bytes, max_memory_bytes)
        # Trees of real snapshots take at most 2.2 bytes per byte.
        self.tree_bytes = min(256 * MIB + 3 * content_bytes, max_memory_bytes)

    def spend_rows(self, count: int) -> None:
        """Count rows of the tables of a snapshot."""
        self._spend("rows", count)

    def spend_items(self, count: int) -> None:
        """Count items that are read from lists."""
        self._spend("items", count)

    def spend_stacks(self, frame_count: int, character_count: int) -> None:
        """Count the frames and the characters of the distinct call stacks of a device."""
        self._spend("frames", frame_count)
        self._spend("characters", character_count)

    def _spend(self, kind: str, count: int) -> None:
        self._remaining[kind] -= count
        if self._remaining[kind] < 0:
            raise SnapshotError(
                "the file describes more events, blocks or call stacks than a snapshot of its size"
                f" ({self._size_text}) can contain",
                hint="write the snapshot again"
                + (
                    "; if you trust the file, decompress it first"
                    if self._decompressing_helps
                    else ""
                ),
            )

    def check_objects(self, estimated_bytes: int) -> None:
        """Check an estimate of the memory that the Python objects of the content take."""
        if estimated_bytes > self._max_object_bytes:
            raise memory_error(self._max_object_bytes)


def memory_share(memory_bytes: int | None) -> int:
    """Return the maximum bytes of the content of a file, or of its tree: half of the available memory."""
    return 1 << 62 if memory_bytes is None else memory_bytes // 2


def memory_error(limit_bytes: int) -> SnapshotError:
    """Return the error for a file whose content takes too much memory."""
    return SnapshotError(
        f"reading the file needs more than {limit_bytes // MIB:,} MiB of memory: the limit for its size, or "
        "half of the available memory",
        hint="if you trust the file, decompress it first, or use a machine with more memory",
    )
