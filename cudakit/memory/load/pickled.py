"""Parse a pickle into a Tree, without looking up a class or calling anything.

Two machines accept the same files: the compiled one (``native/pickled/*.c``), and a slower one in Python
(``machine.py``), which is used if the package was installed without a C compiler.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cudakit.errors import SnapshotError
from cudakit.memory.load.machine import Machine, convert_argument
from cudakit.memory.load.tree import (
    MAX_KEYS,
    SNAPSHOT_FILE,
    Budget,
    Handles,
    ObjectTree,
    Tree,
    check_subtree,
    keys_error,
    kind_error,
    memory_error,
)
from cudakit.memory.snapshot import Ids, Ints, Mask

try:
    from cudakit.memory.load._pickled import PickledTree
except ImportError:  # the package was installed without a C compiler
    HAS_COMPILED_READER = False
else:
    HAS_COMPILED_READER = True

_HINT_COPY = "copy the file again, or take the snapshot again"

_CALLING_OPCODES = re.compile(
    r"(STACK_)?GLOBAL|REDUCE|BUILD|INST|OBJ|NEWOBJ(_EX)?|EXT[124]|(BIN)?PERSID"
)
_DAMAGE_REASONS = {
    "stack": "needs more values than the stack has",
    "mark": "needs a MARK, and the stack has none",
    "target": "adds items to a value that cannot hold them",
    "pairs": "has a key without a value",
    "memo": "reads a memo entry that was not stored",
    "memo_index": "stores a memo entry whose index is too large for its position in the file",
    "argument": "has an invalid argument",
    "protocol": "declares a protocol above 5",
}


# Size in bytes of the Python object that each opcode creates: lists and tuples (created as lists),
# dictionaries, and the stack that MARK begins. All other opcodes of real snapshots create 4 bytes of objects
# per byte of the file.
_OBJECT_BYTES = {
    b"]": 64,
    b")": 64,
    b"l": 64,
    b"t": 64,
    b"\x85": 64,
    b"(": 64,
    b"}": 240,
    b"d": 240,
}


def read(content: bytes, budget: Budget | None = None, *, native: bool | None = None) -> Tree:
    """Parse a pickle (protocols 0 to 5) of lists, tuples, dictionaries, texts and numbers.

    ``budget`` is that of the file; None is the budget of an uncompressed file. ``native`` chooses the
    machine: True is the compiled one, False the one in Python, None the compiled one if it is installed.
    Raises SnapshotError if the file is truncated or damaged, or contains anything else.
    """
    budget = budget or Budget(len(content), len(content))
    try:
        if HAS_COMPILED_READER if native is None else native:
            return NativeTree(content, budget)
        containers = sum(content.count(opcode) * size for opcode, size in _OBJECT_BYTES.items())
        budget.check_objects(containers + 4 * len(content))
        # The garbage collector would visit all dictionaries repeatedly, and find no garbage.
        gc_was_enabled = gc.isenabled()
        gc.disable()
        try:
            return ObjectTree(Machine(content).run(), budget)
        finally:
            if gc_was_enabled:
                gc.enable()
    except ValueError as error:
        reason, offset = error.args
        if reason == "memory_limit":
            raise memory_error(budget.tree_bytes) from None
        raise _rejection(content, reason, offset) from None


def _rejection(content: bytes, reason: str, offset: int) -> SnapshotError:
    if reason == "truncated":
        return SnapshotError(
            f"the file is truncated after {len(content):,} bytes: copying or writing it did not finish",
            hint=_HINT_COPY,
        )
    # Only errors need this table, and building it takes milliseconds.
    from pickletools import opcodes

    name = {ord(info.code): info.name for info in opcodes}.get(content[offset])
    is_pickle = content.startswith(b"\x80")
    hint = SNAPSHOT_FILE.hint
    if name is None:
        text = (
            f"{content[offset]:#04x} is not an opcode: the file is not a pickle, or it is damaged"
        )
    elif reason != "opcode":
        suffix = "" if is_pickle else ", or not a pickle"
        text = f"opcode {name} {_DAMAGE_REASONS[reason]}: the file is damaged{suffix}"
        hint = _HINT_COPY if is_pickle else hint
    elif _CALLING_OPCODES.fullmatch(name):
        text = (
            f"opcode {name} names or calls a class or function; "
            "a memory snapshot holds only plain data, so nothing was loaded"
        )
    else:
        text = f"opcode {name} makes an object that no memory snapshot holds, so nothing was loaded"
    return SnapshotError(f"byte {offset:,}: {text}", hint=hint)


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
