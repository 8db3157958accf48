"""The pickle machine in Python: it turns a pickle of plain data into lists, dictionaries and scalars.

It is used if the compiled reader is missing, and accepts and rejects the same files as the C code
(``native/pickled/machine.c``), at the same byte for the same reason. Tuples become lists. Keys that are not
text are dropped with their values, so that only text is ever hashed. The standard library's ``pickletools``
describes each opcode.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

_MAX_PROTOCOL = 5
_STOP = ord(".")

# The opcodes that Machine._run_frequent executes.
_MEMOIZE, _MARK, _EMPTY_LIST, _EMPTY_DICT = 0x94, ord("("), ord("]"), ord("}")


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
        self._memo = Memo()
        self._pushed_values = PushedValues(self._memo)

    def run(self) -> Any:
        """Return the value of the pickle. Raises PickleRejected."""
        data, handlers = self._data, _OPCODE_HANDLERS
        try:
            while True:
                self._opcode_position = position = self._run_frequent()
                self._position = position + 1
                if data[position] == _STOP:
                    return self._top_value()
                handlers[data[position]](self)
        except IndexError:
            raise self._rejection("truncated") from None

    def _run_frequent(self) -> int:
        """Execute the most frequent opcodes of snapshots, without a function call per opcode.

        Returns the position of the first opcode that is not frequent, or that fails.
        """
        data, memo, position, stack = self._data, self._memo, self._position, self._stack
        pushed_value = self._pushed_values.__getitem__
        while True:
            opcode = data[position]
            if opcode in PUSH_OPCODES:
                pushes = PUSHES.match(data, position)
                if pushes is None:  # the file is truncated
                    break
                end = pushes.end()
                try:
                    stack += list(map(pushed_value, PUSH.findall(data, position, end)))
                except KeyError:  # the memo lacks the entry
                    break
                position = end
            elif opcode == _EMPTY_DICT:
                position = memo.push_dicts(data, position, stack)
            elif opcode == _MEMOIZE and stack:
                if memo.put(memo.value_count, stack[-1]):
                    self._pushed_values.clear()
                position += 1
            elif opcode == _MARK:
                self._metastack.append(stack)
                stack = []
                position += 1
            elif opcode == _EMPTY_LIST:
                stack.append([])
                position += 1
            else:
                break
        self._stack = stack
        return position

    def _rejection(self, reason: str) -> PickleRejected:
        return PickleRejected(reason, self._opcode_position)

    # Methods that read the arguments of opcodes.

    def read_bytes(self, count: int) -> bytes:
        start_position = self._position
        self._position += count
        if self._position > len(self._data):
            raise self._rejection("truncated")
        return self._data[start_position : self._position]

    def read_byte(self) -> int:
        position = self._position
        self._position = position + 1
        return self._data[position]

    def read_unsigned(self, width: int) -> int:
        return int.from_bytes(self.read_bytes(width), "little")

    def read_sized_bytes(self, width: int) -> bytes:
        """Read bytes that follow their own length, an integer of ``width`` bytes."""
        return self.read_bytes(self.read_unsigned(width))

    def read_text(self, width: int) -> str:
        encoded_text = self.read_sized_bytes(width)
        text: str = (
            encoded_text.decode()
            if encoded_text.isascii()
            else self._convert_argument(encoded_text)
        )
        return text

    def read_line(self) -> Any:
        start_position, end = self._position, self._data.find(b"\n", self._position)
        if end < 0:
            raise self._rejection("truncated")
        self._position = end + 1
        return self._convert_argument(self._data[start_position:end])

    def _convert_argument(self, argument_bytes: bytes) -> Any:
        try:
            return convert_argument(self._data[self._opcode_position], argument_bytes)
        except ValueError:
            raise self._rejection("argument") from None

    # Opcodes that change the stack.

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
            self._pop_last(1)

    def pop_mark(self) -> list[Any]:
        if not self._metastack:
            raise self._rejection("mark")
        popped_items, self._stack = self._stack, self._metastack.pop()
        return popped_items

    def _pop_last(self, count: int) -> list[Any]:
        start_index = len(self._stack) - count
        if start_index < 0:
            raise self._rejection("stack")
        popped_items = self._stack[start_index:]
        del self._stack[start_index:]
        return popped_items

    # Opcodes that store and push memo values.

    def put(self, index: int) -> None:
        value = self._top_value()
        # A file of N bytes stores at most N values.
        if index >= self._position:
            raise self._rejection("memo_index")
        if self._memo.put(index, value):
            self._pushed_values.clear()

    def memoize(self) -> None:
        self.put(self._memo.value_count)

    def get(self, index: int) -> None:
        try:
            self._stack.append(self._memo[index])
        except KeyError:
            raise self._rejection("memo") from None

    # Opcodes that create and fill lists and dictionaries.

    def make_list(self, count: int | None = None) -> None:
        self.push(self.pop_mark() if count is None else self._pop_last(count))

    def make_dict(self) -> None:
        new_dict: dict[str, Any] = {}
        self._set_values(new_dict, self.pop_mark())
        self.push(new_dict)

    def append(self) -> None:
        self._append_items(self._pop_last(1))

    def appends(self) -> None:
        self._append_items(self.pop_mark())

    def _append_items(self, items: list[Any]) -> None:
        container = self._top_value()
        if not isinstance(container, list):
            raise self._rejection("target")
        container += items

    def set_item(self) -> None:
        self._set_top(self._pop_last(2))

    def set_items(self) -> None:
        self._set_top(self.pop_mark())

    def _set_top(self, pairs: list[Any]) -> None:
        container = self._top_value()
        if not isinstance(container, dict):
            raise self._rejection("target")
        self._set_values(container, pairs)

    def _set_values(self, container: dict[str, Any], pairs: list[Any]) -> None:
        if len(pairs) % 2:
            raise self._rejection("pairs")
        keys, values = pairs[::2], pairs[1::2]
        if set(map(type, keys)) <= {str}:
            container.update(zip(keys, values, strict=True))
        else:
            items = zip(keys, values, strict=True)
            container.update((key, value) for key, value in items if isinstance(key, str))

    # Opcodes of the protocol version and of frames.

    def protocol(self) -> None:
        if self.read_byte() > _MAX_PROTOCOL:
            raise self._rejection("protocol")

    def frame(self) -> None:
        # A frame that is longer than the rest of the file means that the file is truncated.
        if self.read_unsigned(8) > len(self._data) - self._position:
            raise self._rejection("truncated")

    def reject_opcode(self) -> None:
        raise self._rejection("opcode")


_OpcodeHandler: TypeAlias = Callable[[Machine], object]

_HANDLER_BY_OPCODE: dict[bytes, _OpcodeHandler] = {
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.read_byte()),
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
    b"I": lambda m: m.push(m.read_line()),
    b"L": lambda m: m.push(m.read_line()),
    b"F": lambda m: m.push(m.read_line()),
    b"S": lambda m: m.push(m.read_line()),
    b"V": lambda m: m.push(m.read_line()),
    b"]": lambda m: m.make_list(0),
    b")": lambda m: m.make_list(0),
    b"\x85": lambda m: m.make_list(1),
    b"\x86": lambda m: m.make_list(2),
    b"\x87": lambda m: m.make_list(3),
    b"l": Machine.make_list,
    b"t": Machine.make_list,
    b"}": lambda m: m.push({}),
    b"d": Machine.make_dict,
    b"a": Machine.append,
    b"e": Machine.appends,
    b"s": Machine.set_item,
    b"u": Machine.set_items,
    b"(": Machine.mark,
    b"0": Machine.pop,
    b"1": Machine.pop_mark,
    b"2": Machine.duplicate,
    b"p": lambda m: m.put(m.read_line()),
    b"q": lambda m: m.put(m.read_byte()),
    b"r": lambda m: m.put(m.read_unsigned(4)),
    b"\x94": Machine.memoize,
    b"g": lambda m: m.get(m.read_line()),
    b"h": lambda m: m.get(m.read_byte()),
    b"j": lambda m: m.get(m.read_unsigned(4)),
    b"\x80": Machine.protocol,
    b"\x95": Machine.frame,
}

_OPCODE_HANDLERS: tuple[_OpcodeHandler, ...] = tuple(
    _HANDLER_BY_OPCODE.get(bytes([opcode]), Machine.reject_opcode) for opcode in range(256)
)


# --- runs of the most frequent opcodes -------------------------------------------------------------
#
# Regular expressions recognise consecutive opcodes that push memo values and integers, and runs of
# dictionaries of such values. The quantifiers are possessive and bounded, so that a file cannot make the
# expressions backtrack, or match its bytes repeatedly.

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
        self.value_count += _NEXT_MEMOIZE.findall(match[0]).count(b"\x94")
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


# --- Convert the argument of a pickle opcode that is a line or a text, for both pickle machines ----

# The limit of Python's int() (sys.int_info.default_max_str_digits), whose time grows faster than the
# number of digits.
_MAX_DIGITS = 4300

_DECIMAL = re.compile(rb"-?[0-9]+")
_UNSIGNED_DECIMAL = re.compile(rb"[0-9]+")


def convert_argument(opcode: int, argument_bytes: bytes) -> bool | int | float | str:
    """Return the value of an opcode's argument, for both machines. ``raw`` is a line or the bytes of a text.

    Raises ValueError if the argument is invalid.
    """
    match chr(opcode):
        case "I" if argument_bytes in (b"00", b"01"):
            return argument_bytes == b"01"
        case "I":
            return _parse_integer(argument_bytes, _DECIMAL)
        case "L":
            return _parse_integer(argument_bytes.removesuffix(b"L"), _DECIMAL)
        case "g" | "p":
            return _parse_integer(argument_bytes, _UNSIGNED_DECIMAL)
        case "F":
            return _parse_float(argument_bytes)
        case "V":
            return _decode_printable(argument_bytes, "raw-unicode-escape")
        case "S":
            return _parse_quoted(argument_bytes)
        case "T" | "U":
            return _decode_printable(argument_bytes, "latin-1")
        case _:
            return _decode_printable(argument_bytes, "utf-8")


def _parse_integer(digits_bytes: bytes, pattern: re.Pattern[bytes]) -> int:
    if len(digits_bytes) > _MAX_DIGITS or not pattern.fullmatch(digits_bytes):
        raise ValueError("not an integer")
    return int(digits_bytes)


def _parse_float(text_bytes: bytes) -> float:
    if len(text_bytes) > _MAX_DIGITS:
        raise ValueError("not a number")
    return float(text_bytes)


def _parse_quoted(quoted_bytes: bytes) -> str:
    # Python 2 wrote quoted texts with escapes, which are not decoded here.
    if (
        len(quoted_bytes) < 2
        or quoted_bytes[:1] not in (b"'", b'"')
        or quoted_bytes[-1] != quoted_bytes[0]
    ):
        raise ValueError("not a quoted text")
    return _decode_printable(quoted_bytes[1:-1], "latin-1")


def _decode_printable(text_bytes: bytes, codec: str) -> str:
    """Decode a text; invalid bytes and lone surrogates become escapes, which any encoder accepts."""
    text = text_bytes.decode(codec, "backslashreplace")
    return text.encode("utf-8", "backslashreplace").decode()
