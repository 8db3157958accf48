"""Parse a pickle into a Tree, without looking up a class or calling anything.

Two machines accept the same files, and reject others at the same byte for the same reason: the compiled one
(``native/pickled/*.c``), and ``Machine`` in Python, which is used if the package was installed without a C
compiler and takes about 10 times longer. The standard library's ``pickletools`` describes each opcode.
"""

from __future__ import annotations

import gc
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from cudakit.errors import SnapshotError
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


# --- The pickle machine in Python: it turns a pickle of plain data into lists, dictionaries and scalars ---
#
# Tuples become lists. Keys that are not text are dropped with their values, so that only text is ever hashed.

_MAX_PROTOCOL = 5
_STOP = ord(".")
_BINGET, _LONG_BINGET, _MEMOIZE = ord("h"), ord("j"), 0x94


class PickleRejected(ValueError):
    """Raised for a rejected file; the arguments are a reason word and the offset of the opcode."""


class Machine:
    """Runs one pickle. As in Python's unpickler, MARK pushes the stack on the metastack."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._opcode_position = 0
        self._stack: list[Any] = []
        self._metastack: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Return the value of the pickle. Raises PickleRejected."""
        data, memo, handlers = self._data, self._memo, _HANDLERS
        try:
            while True:
                position = self._opcode_position = self._position
                opcode = data[position]
                self._position = position + 1
                # Most opcodes of a snapshot push a value of the memo.
                if opcode == _BINGET and (index := data[position + 1]) in memo:
                    self._stack.append(memo[index])
                    self._position = position + 2
                elif (
                    opcode == _LONG_BINGET
                    and (index := int.from_bytes(data[position + 1 : position + 5], "little"))
                    in memo
                ):
                    self._stack.append(memo[index])
                    self._position = position + 5
                elif opcode == _MEMOIZE and self._stack:
                    memo[len(memo)] = self._stack[-1]
                elif opcode == _STOP:
                    return self._top_value()
                else:
                    handlers[opcode](self)
        except IndexError:
            raise self._rejection("truncated") from None

    def _rejection(self, reason: str) -> PickleRejected:
        return PickleRejected(reason, self._opcode_position)

    def reject(self) -> None:
        raise self._rejection("opcode")

    # --- arguments of opcodes

    def read_bytes(self, count: int) -> bytes:
        start, self._position = self._position, self._position + count
        if self._position > len(self._data):
            raise self._rejection("truncated")
        return self._data[start : self._position]

    def read_unsigned(self, width: int) -> int:
        return int.from_bytes(self.read_bytes(width), "little")

    def read_sized_bytes(self, width: int) -> bytes:
        """Read bytes that follow their own length, an integer of ``width`` bytes."""
        return self.read_bytes(self.read_unsigned(width))

    def read_text(self, width: int) -> Any:
        return self._converted(self.read_sized_bytes(width))

    def read_line(self) -> Any:
        end = self._data.find(b"\n", self._position)
        if end < 0:
            raise self._rejection("truncated")
        return self._converted(self.read_bytes(end + 1 - self._position)[:-1])

    def _converted(self, argument: bytes) -> Any:
        try:
            return convert_argument(self._data[self._opcode_position], argument)
        except ValueError:
            raise self._rejection("argument") from None

    def check_protocol(self) -> None:
        if self.read_unsigned(1) > _MAX_PROTOCOL:
            raise self._rejection("protocol")

    def check_frame(self) -> None:
        if self.read_unsigned(8) > len(self._data) - self._position:
            raise self._rejection("truncated")

    # --- the stack

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def _top_value(self) -> Any:
        if not self._stack:
            raise self._rejection("stack")
        return self._stack[-1]

    def duplicate(self) -> None:
        self.push(self._top_value())

    def mark(self) -> None:
        self._metastack.append(self._stack)
        self._stack = []

    def pop(self) -> None:
        if self._metastack and not self._stack:
            self.pop_mark()
        else:
            self.pop_last(1)

    def pop_mark(self) -> list[Any]:
        if not self._metastack:
            raise self._rejection("mark")
        items, self._stack = self._stack, self._metastack.pop()
        return items

    def pop_last(self, count: int) -> list[Any]:
        start = len(self._stack) - count
        if start < 0:
            raise self._rejection("stack")
        items = self._stack[start:]
        del self._stack[start:]
        return items

    # --- the memo

    def put(self, index: int | None = None) -> None:
        value = self._top_value()
        index = len(self._memo) if index is None else index
        # A file of N bytes stores at most N values.
        if index >= self._position:
            raise self._rejection("memo_index")
        self._memo[index] = value

    def get(self, index: int) -> None:
        if index not in self._memo:
            raise self._rejection("memo")
        self.push(self._memo[index])

    # --- lists and dictionaries

    def append_items(self, items: list[Any]) -> None:
        container = self._top_value()
        if not isinstance(container, list):
            raise self._rejection("target")
        container += items

    def set_items(self, pairs: list[Any]) -> None:
        container = self._top_value()
        if not isinstance(container, dict):
            raise self._rejection("target")
        if len(pairs) % 2:
            raise self._rejection("pairs")
        items = zip(pairs[::2], pairs[1::2], strict=True)
        container.update((key, value) for key, value in items if isinstance(key, str))

    def push_dict(self) -> None:
        pairs = self.pop_mark()
        self.push({})
        self.set_items(pairs)


_Handler: TypeAlias = Callable[[Machine], object]


_HANDLER_BY_OPCODE: dict[bytes, _Handler] = {
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.read_unsigned(1)),
    b"M": lambda m: m.push(m.read_unsigned(2)),
    b"J": lambda m: m.push(int.from_bytes(m.read_bytes(4), "little", signed=True)),
    b"\x8a": lambda m: m.push(int.from_bytes(m.read_sized_bytes(1), "little", signed=True)),
    b"\x8b": lambda m: m.push(int.from_bytes(m.read_sized_bytes(4), "little", signed=True)),
    b"G": lambda m: m.push(*struct.unpack(">d", m.read_bytes(8))),
    b"U": lambda m: m.push(m.read_text(1)),
    b"T": lambda m: m.push(m.read_text(4)),
    b"\x8c": lambda m: m.push(m.read_text(1)),
    b"X": lambda m: m.push(m.read_text(4)),
    b"\x8d": lambda m: m.push(m.read_text(8)),
    b"C": lambda m: m.push(m.read_sized_bytes(1)),
    b"B": lambda m: m.push(m.read_sized_bytes(4)),
    b"\x8e": lambda m: m.push(m.read_sized_bytes(8)),
    **dict.fromkeys((b"I", b"L", b"F", b"S", b"V"), lambda m: m.push(m.read_line())),
    **dict.fromkeys((b"]", b")"), lambda m: m.push([])),
    b"\x85": lambda m: m.push(m.pop_last(1)),
    b"\x86": lambda m: m.push(m.pop_last(2)),
    b"\x87": lambda m: m.push(m.pop_last(3)),
    **dict.fromkeys((b"l", b"t"), lambda m: m.push(m.pop_mark())),
    b"}": lambda m: m.push({}),
    b"d": Machine.push_dict,
    b"a": lambda m: m.append_items(m.pop_last(1)),
    b"e": lambda m: m.append_items(m.pop_mark()),
    b"s": lambda m: m.set_items(m.pop_last(2)),
    b"u": lambda m: m.set_items(m.pop_mark()),
    b"(": Machine.mark,
    b"0": Machine.pop,
    b"1": Machine.pop_mark,
    b"2": Machine.duplicate,
    b"p": lambda m: m.put(m.read_line()),
    b"q": lambda m: m.put(m.read_unsigned(1)),
    b"r": lambda m: m.put(m.read_unsigned(4)),
    b"\x94": Machine.put,
    b"g": lambda m: m.get(m.read_line()),
    b"h": lambda m: m.get(m.read_unsigned(1)),
    b"j": lambda m: m.get(m.read_unsigned(4)),
    b"\x80": Machine.check_protocol,
    b"\x95": Machine.check_frame,
}
_HANDLERS = [_HANDLER_BY_OPCODE.get(bytes([opcode]), Machine.reject) for opcode in range(256)]


# --- Convert the argument of a pickle opcode that is a line or a text, for both pickle machines ----

# The limit of Python's int() (sys.int_info.default_max_str_digits), whose time grows faster than the
# number of digits.
_MAX_DIGITS = 4300

_CODECS = {"V": "raw-unicode-escape", "S": "latin-1", "T": "latin-1", "U": "latin-1"}


def convert_argument(opcode: int, argument: bytes) -> bool | int | float | str:
    """Return the value of an opcode's argument: a line, or the bytes of a text.

    Raises ValueError if the argument is invalid.
    """
    name = chr(opcode)
    if name in "ILFgp":
        if name == "I" and argument in (b"00", b"01"):
            return argument == b"01"
        digits = argument.removesuffix(b"L") if name == "L" else argument
        if len(digits) > _MAX_DIGITS:
            raise ValueError("too many digits")
        if name == "F":
            return float(digits)
        if not re.fullmatch(rb"[0-9]+" if name in "gp" else rb"-?[0-9]+", digits):
            raise ValueError("not an integer")
        return int(digits)
    if name == "S":
        # Python 2 wrote quoted texts with escapes, which are not decoded here.
        if len(argument) < 2 or argument[:1] not in (b"'", b'"') or argument[0] != argument[-1]:
            raise ValueError("not a quoted text")
        argument = argument[1:-1]
    text = argument.decode(_CODECS.get(name, "utf-8"), "backslashreplace")
    # Lone surrogates become escapes, which any encoder accepts.
    return text.encode("utf-8", "backslashreplace").decode()
