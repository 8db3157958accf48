"""Read runs of the most frequent pickle opcodes at once, for the unpickler that is written in Python.

Regular expressions recognise consecutive opcodes that push memo values and integers, and runs of dictionaries
of such values. The quantifiers are possessive and bounded, so that a file cannot make the expressions
backtrack, or match its bytes repeatedly.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Iterator
from typing import Any

# Opcodes that push a value of the memo: BINGET, LONG_BINGET.
_GET_PATTERN = rb"h.|j.{4}"
# Opcodes that push a value of the memo, or an integer of at most 64 bits: also BININT1, BININT, BININT2,
# LONG1.
_PUSH_PATTERN = rb"%b|K.|J.{4}|M..|\x8a(?:%b)" % (
    _GET_PATTERN,
    b"|".join(b"\\x%02x.{%d}" % (length, length) for length in range(1, 10)),
)
# An ASCII text of at most 40 characters: SHORT_BINUNICODE.
_TEXT_PATTERN = rb"\x8c(?:%b)" % b"|".join(
    b"\\x%02x[\0-\x7f]{%d}" % (length, length) for length in range(41)
)
_NEW_TEXT_PATTERN = rb"(?:%b)\x94" % _TEXT_PATTERN  # a text, which MEMOIZE stores in the memo
# A new list of memo values, such as the frames of an event: EMPTY_LIST, MEMOIZE, MARK, values, APPENDS.
_LIST_PATTERN = rb"\]\x94\((?:%b){0,1024}+e" % _GET_PATTERN
# A new dictionary, such as an event: EMPTY_DICT, MEMOIZE, MARK, keys and values, SETITEMS. The values
# [N\x88\x89] are None, True and False.
_DICT_PATTERN = rb"\}\x94\((?:(?:%b|%b)(?:%b|%b|%b|[N\x88\x89])){1,128}+u" % (
    _GET_PATTERN,
    _NEW_TEXT_PATTERN,
    _PUSH_PATTERN,
    _NEW_TEXT_PATTERN,
    _LIST_PATTERN,
)
_MEMOIZE = b"\x94"

PUSH = re.compile(_PUSH_PATTERN, re.DOTALL)
# Consecutive pushes. The limit bounds the work that is repeated for a missing memo entry.
PUSHES = re.compile(rb"(?:%b){1,256}+" % _PUSH_PATTERN, re.DOTALL)
PUSH_OPCODES = frozenset(b"hjKJM\x8a")
# Consecutive dictionaries. The limit bounds the memory for a copy of their opcodes.
_DICTS = re.compile(rb"(?:%b){1,4096}+" % _DICT_PATTERN, re.DOTALL)

# The opcodes of _DICTS up to the next MEMOIZE.
_NEXT_MEMOIZE = re.compile(
    rb"(?:%b|%b|[]}(euN\x88\x89])*+(\x94|\Z)" % (_PUSH_PATTERN, _TEXT_PATTERN), re.DOTALL
)

_LONG1, _BININT, _UNSIGNED_INTEGERS = 0x8A, ord("J"), b"KM"
_MAX_STORED_VALUES = 1 << 14


class Memo(dict[int, Any]):
    """The memo of a pickle: values by index, and a reader of dictionaries whose keys are in the memo.

    Python's compiled unpickler reads the dictionaries. Its memo has the same values, because it only stores
    values in their order: after an index that is out of order, and after an error, it is not used any more.
    """

    def __init__(self) -> None:
        # Number of values in the memo.
        self.value_count = 0
        self._unpickler = _MemoUnpickler()
        self._is_unpickler_usable = True
        # Number of values in the unpickler's memo. The values in its dictionaries are fetched at their first
        # use.
        self._unpickler_count = 0
        # Values that the unpickler's memo lacks.
        self._new_values: list[Any] = []

    def __missing__(self, index: int) -> Any:
        if index >= self._unpickler_count:
            raise KeyError(index)
        memo_value = self[index] = self._unpickler.memo_value(index)
        return memo_value

    def put(self, index: int, value: Any) -> bool:
        """Store a value under an index; return whether it replaced another value."""
        is_replaced = index < self._unpickler_count or index in self
        if index != self.value_count:
            self._is_unpickler_usable = False
        self[index] = value
        self.value_count += not is_replaced
        if self._is_unpickler_usable:
            self._new_values.append(value)
        return is_replaced

    def push_dicts(self, data: bytes, position: int, stack: list[Any]) -> int:
        """Push the dictionaries that begin at a position, and return the end of the executed opcodes.

        Pushes one empty dictionary, as the opcode at the position does, if its content needs other opcodes.
        """
        match = _DICTS.match(data, position) if self._is_unpickler_usable else None
        dicts = self._read_dicts(match[0]) if match else []
        if match is None or not dicts:
            stack.append({})
            return position + 1
        stack += dicts
        self.value_count += _NEXT_MEMOIZE.findall(match[0]).count(_MEMOIZE)
        self._unpickler_count = self.value_count
        return match.end()

    def _read_dicts(self, opcodes: bytes) -> list[dict[str, Any]]:
        """Return the dictionaries that opcodes push; an empty list if a dictionary is invalid."""
        # Only text is allowed as a key. Lists and dictionaries cannot be keys, but numbers can, and a file
        # can choose numbers whose hashes collide.
        if not set(map(type, self._new_values)) <= {str, list, dict}:
            self._is_unpickler_usable = False
            return []
        try:
            self._unpickler.memoize(self._new_values)
            self._new_values = []
            dicts: list[dict[str, Any]] = self._unpickler.execute(b"](" + opcodes + b"e")
        except (pickle.UnpicklingError, TypeError):  # a missing memo value; a key that is not text
            # The unpickler failed in the middle of the opcodes, and its memo contains some of their values.
            self._is_unpickler_usable = False
            memo_values = self._unpickler.memo.copy()
            self.update(
                (index, memo_values[index])
                for index in range(self._unpickler_count)
                if index not in self
            )
            return []
        return dicts


class _MemoUnpickler(pickle.Unpickler):
    """Python's unpickler, for opcodes that push memo values, integers, lists and dictionaries only.

    None of these opcodes looks up a class or calls a function.
    """

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._values_to_memoize: Iterator[Any] = iter(())
        super().__init__(self._file)

    def memoize(self, values: list[Any]) -> None:
        """Append values to the memo."""
        self._values_to_memoize = iter(values)
        # Opcodes for each value: NONE, BINPERSID (replaces None by the result of persistent_load), MEMOIZE,
        # POP.
        self.execute(b"NQ\x940" * len(values) + b"N")

    def memo_value(self, index: int) -> Any:
        """Return a value of the memo."""
        return self.execute(b"j" + struct.pack("<I", index))

    def persistent_load(self, _pid: object, /) -> Any:
        """Return the next value to memoize."""
        return next(self._values_to_memoize)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Refuse to look up a class; no executed opcode needs a class."""
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not plain data")

    def execute(self, opcodes: bytes) -> Any:
        """Execute opcodes, and return the value that they push."""
        self._file.seek(0)
        self._file.truncate()
        # PROTO 4, FRAME: the unpickler reads a frame with one call of the file's method ``read``.
        self._file.write(b"\x80\x04\x95" + struct.pack("<Q", len(opcodes) + 1) + opcodes + b".")
        self._file.seek(0)
        return self.load()


class PushedValues(dict[bytes, Any]):
    """The value that each opcode with its argument pushes, for the opcodes of PUSH.

    The first values are cached: clear this dict if a memo entry is replaced. Raises KeyError for
    a memo entry that was not stored.
    """

    def __init__(self, memo: Memo) -> None:
        self._memo = memo

    def __missing__(self, push_opcode: bytes) -> Any:
        opcode = push_opcode[0]
        pushed_value: Any
        if opcode == _LONG1:
            pushed_value = int.from_bytes(push_opcode[2:], "little", signed=True)
        elif opcode == _BININT:
            pushed_value = int.from_bytes(push_opcode[1:], "little", signed=True)
        else:
            pushed_value = int.from_bytes(push_opcode[1:], "little")
            if opcode not in _UNSIGNED_INTEGERS:
                pushed_value = self._memo[pushed_value]
        if len(self) < _MAX_STORED_VALUES:
            self[push_opcode] = pushed_value
        return pushed_value
