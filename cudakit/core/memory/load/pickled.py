"""From the bytes of a pickle to a Tree, without ever looking up a class or calling anything.

Two machines read the same language and refuse the same files: the native one keeps a million
dictionaries in flat memory; the one in Python serves where that was not built.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.load.machine import Machine
from cudakit.core.memory.load.scalars import convert
from cudakit.core.memory.load.tree import (
    Handles,
    ObjectTree,
    Tree,
    check_size,
    multiplied,
    wrong_kind,
)
from cudakit.errors import SnapshotError

if TYPE_CHECKING:
    from cudakit.core.memory.load._pickled import PickledTree

_HINT_DUMP = "write one with torch.cuda.memory._dump_snapshot('snapshot.pkl')"
_HINT_COPY = "copy the file again, or take the snapshot again"

_CALLS = re.compile(r"(STACK_)?GLOBAL|REDUCE|BUILD|INST|OBJ|NEWOBJ(_EX)?|EXT[124]|(BIN)?PERSID")
_DAMAGES = {
    "stack": "needs values that are not there",
    "mark": "needs a MARK that is not there",
    "target": "adds to a value of another kind",
    "pairs": "has a key without a value",
    "memo": "asks for a value that was not stored",
    "far": "stores under a number greater than its place in the file",
    "argument": "has an argument that makes no sense",
    "protocol": "names a protocol above 5",
}


def read(content: bytes, *, native: bool | None = None) -> Tree:
    """Read a pickle (protocols 0 to 5) of lists, tuples, dictionaries, texts and numbers.

    native chooses the machine; by default it is the native one where that was built. True raises
    ImportError where it was not. The native Tree keeps content alive.

    Raises SnapshotError for a file that is cut, damaged, or holds anything else.
    """
    reader = None if native is False else _native_reader(required=native is True)
    try:
        if reader is None:
            return ObjectTree(_read_objects(content), len(content))
        return _NativeTree(reader(content, os.urandom(16), _packed), len(content))
    except ValueError as error:
        raise _explained(content, *error.args) from None


def _native_reader(*, required: bool) -> type[PickledTree] | None:
    try:
        from cudakit.core.memory.load._pickled import PickledTree
    except ImportError:
        if required:
            raise
        return None
    return PickledTree


def _read_objects(content: bytes) -> Any:
    # A collection would visit every dictionary again and again, and there is no garbage.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return Machine(content).run()
    finally:
        if was_enabled:
            gc.enable()


def _packed(opcode: int, raw: bytes) -> bool | float | str | bytes:
    """Convert for the native machine, which takes integers as bytes in two's complement."""
    value = convert(opcode, raw)
    if isinstance(value, int) and not isinstance(value, bool):
        return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return value


def _explained(content: bytes, why: str, offset: int) -> SnapshotError:
    if why == "cut":
        return SnapshotError(
            f"the file ends in the middle, after {len(content):,} bytes: "
            "the copy or the dump was cut short",
            hint=_HINT_COPY,
        )
    name = _opcode_name(content[offset])
    if why == "opcode":
        return SnapshotError(f"byte {offset:,}: {_refusal(name)}", hint=_HINT_DUMP)
    doubt = "" if content.startswith(b"\x80") else ", or no pickle at all"
    return SnapshotError(
        f"byte {offset:,}: opcode {name} {_DAMAGES[why]}: the file is damaged{doubt}",
        hint=_HINT_COPY if not doubt else _HINT_DUMP,
    )


def _opcode_name(opcode: int) -> str:
    # A table that only errors need, and that takes milliseconds to build.
    from pickletools import opcodes

    names = {known.code: known.name for known in opcodes}
    return names.get(chr(opcode), f"{opcode:#04x}")


def _refusal(name: str) -> str:
    if _CALLS.fullmatch(name):
        return (
            f"opcode {name} names or calls a class or function; "
            "a memory snapshot holds only plain data, so nothing was loaded"
        )
    if name.startswith("0x"):
        return f"{name} is no opcode: the file is not a pickle, or is damaged"
    return f"opcode {name} makes an object that no memory snapshot holds, so nothing was loaded"


class _NativeTree:
    """The nodes that the native machine read, with numpy arrays around them."""

    def __init__(self, nodes: PickledTree, size_bytes: int) -> None:
        self._nodes = nodes
        self._size_bytes = size_bytes

    @property
    def root(self) -> int:
        """The handle of the outermost object."""
        return self._nodes.root

    def plain(self, handle: int) -> Any:
        """Build Python objects of a whole subtree."""
        check_size(handle, self._items, self._size_bytes)
        return self._object(handle)

    def _items(self, handle: int) -> list[int]:
        match self._nodes.kind(handle):
            case "a list":
                return list(self._gathered(np.array([handle], np.uint64))[1].tolist())
            case "a dictionary":
                return list(self._nodes.members(handle).values())
            case _:
                return []

    def _object(self, handle: int) -> Any:
        match self._nodes.kind(handle):
            case "a list":
                return [self._object(item) for item in self._items(handle)]
            case "a dictionary":
                members = self._nodes.members(handle)
                return {key: self._object(value) for key, value in members.items()}
            case _:
                return self._nodes.scalar(handle)

    def members(self, handle: int) -> dict[str, int]:
        """Map a dictionary's text keys to the handles of their values."""
        if (kind := self._nodes.kind(handle)) != "a dictionary":
            raise wrong_kind("a dictionary", kind)
        return self._nodes.members(handle)

    def is_list(self, handle: int) -> bool:
        """Say whether the node is a list or a tuple."""
        return self._nodes.kind(handle) == "a list"

    def children(self, lists: Handles) -> tuple[npt.NDArray[np.int64], Handles]:
        """Concatenate the items of lists."""
        return self._gathered(_aligned(lists))

    def _gathered(self, lists: Handles) -> tuple[npt.NDArray[np.int64], Handles]:
        counts = np.empty(len(lists), np.int64)
        with _wanting("a list"):
            self._nodes.lengths(lists, counts)
        if (total := int(counts.sum())) > self._size_bytes:
            raise multiplied(self._size_bytes)
        items = np.empty(total, np.uint64)
        self._nodes.gather(lists, items)
        return counts, items

    def column(self, dicts: Handles, key: str) -> Handles:
        """Look one key up in many dictionaries."""
        found = np.empty(len(dicts), np.uint64)
        with _wanting("a dictionary"):
            self._nodes.column(_aligned(dicts), found, key)
        return found

    def integers(self, handles: Handles) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Read integers, and which nodes are such."""
        numbers, known = np.empty(len(handles), np.int64), np.empty(len(handles), np.bool_)
        self._nodes.integers(_aligned(handles), numbers, known)
        return numbers, known

    def intern(self, handles: Handles) -> tuple[npt.NDArray[np.int32], Handles]:
        """Number nodes by content."""
        ids, nodes = np.empty(len(handles), np.int32), np.empty(len(handles), np.uint64)
        self._nodes.intern(_aligned(handles), ids, nodes)
        return ids, nodes[: int(ids.max(initial=-1)) + 1].copy()


def _aligned(handles: Handles) -> Handles:
    return np.require(handles, np.uint64, ["C_CONTIGUOUS", "ALIGNED"])


@contextmanager
def _wanting(kind: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise wrong_kind(kind, error.args[1]) from None
