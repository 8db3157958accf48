"""Encode many messages of the same shape in the wire format of Protocol Buffers at once.

A column of messages is a two-dimensional array of bytes, with one row for each message. All rows of a column
have the same length, because varints are padded: a varint may have continuation bytes with a value of zero
(protobuf.dev, "Encoding"; Perfetto's own writer pads lengths in this way).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from cudakit.profile.timeline import Column

Bytes2D = npt.NDArray[np.uint8]

_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH: Final = 2


def varint(encoded_number: int) -> bytes:
    """Return a number as a varint."""
    encoded_bytes = bytearray()
    while encoded_number > 0x7F:
        encoded_bytes.append(0x80 | encoded_number & 0x7F)
        encoded_number >>= 7
    encoded_bytes.append(encoded_number)
    return bytes(encoded_bytes)


def number_field(field: int, number: int) -> bytes:
    """Return a field with a number."""
    return varint(field << 3 | _VARINT) + varint(number)


def bytes_field(field: int, content: bytes) -> bytes:
    """Return a field with bytes: a text or a message."""
    return varint(field << 3 | _LENGTH) + varint(len(content)) + content


def text_field(field: int, text: str) -> bytes:
    """Return a field with a text, which must have no lone surrogates."""
    return bytes_field(field, text.encode())


def constant(content: bytes) -> Bytes2D:
    """Return a column with one row, whose bytes are the same in every message."""
    return np.frombuffer(content, np.uint8).reshape(1, -1)


def number_column(field: int, numbers: Column) -> Bytes2D:
    """Return a field with a different number in each message."""
    unsigned_numbers = numbers.astype(np.uint64)
    byte_count = max((int(unsigned_numbers.max(initial=0)).bit_length() + 6) // 7, 1)
    shifts = np.arange(byte_count, dtype=np.uint64) * np.uint64(7)
    digits = (unsigned_numbers[:, None] >> shifts & np.uint64(0x7F)).astype(np.uint8)
    digits[:, :-1] |= 0x80
    return beside(constant(varint(field << 3 | _VARINT)), digits)


def fixed64_column(field: int, numbers: Column) -> Bytes2D:
    """Return a field of 8 bytes, which holds one of the numbers in each message."""
    number_bytes = np.ascontiguousarray(numbers, "<u8").view(np.uint8).reshape(len(numbers), 8)
    return beside(constant(varint(field << 3 | _FIXED64)), number_bytes)


def message_column(field: int, *columns: Bytes2D) -> Bytes2D:
    """Return a field with a message in each row, which consists of the columns."""
    content = beside(*columns)
    return beside(constant(varint(field << 3 | _LENGTH) + varint(content.shape[1])), content)


def beside(*columns: Bytes2D) -> Bytes2D:
    """Join columns row by row; a column with one row is repeated."""
    rows = max(len(column) for column in columns)
    return np.concatenate(
        [np.broadcast_to(column, (rows, column.shape[1])) for column in columns], axis=1
    )


def interleaved(order: Column, *columns: Bytes2D) -> bytes:
    """Return the rows of all columns as bytes; ``order`` lists row numbers of the joined columns."""
    widths = np.concatenate([np.full(len(column), column.shape[1]) for column in columns])
    place = np.empty(len(order), np.int64)
    row_ends = np.cumsum(widths[order])
    place[order] = row_ends - widths[order]
    encoded_columns = np.empty(int(row_ends[-1]) if len(row_ends) else 0, np.uint8)
    first_row = 0
    for column in columns:
        rows = place[first_row : first_row + len(column)]
        encoded_columns[rows[:, None] + np.arange(column.shape[1])] = column
        first_row += len(column)
    return encoded_columns.tobytes()
