"""The pickle machine in Python: it turns a pickle of plain data into lists, dictionaries and scalars.

It is used if the compiled reader is missing, and accepts and rejects the same files as ``reader/machine.c``,
at the same byte for the same reason. Tuples become lists. Keys that are not text are dropped with their
values, so that only text is ever hashed. The standard library's ``pickletools`` describes each opcode.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

from cudakit.memory.load.arguments import convert_argument
from cudakit.memory.load.frequent import PUSH, PUSH_OPCODES, PUSHES, Memo, PushedValues

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
