"""Tests of the encoder of Protocol Buffers, with a decoder of the wire format that is written here."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cudakit.report.perfetto import (
    beside,
    bytes_field,
    constant,
    fixed64_column,
    interleaved,
    message_column,
    number_column,
    number_field,
    text_field,
)

NUMBERS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20)
FIELDS = st.integers(1, 2000)


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        number |= (data[place] & 0x7F) << shift
        shift += 7
        place += 1
        if data[place - 1] < 0x80:
            return number, place


def decoded(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field; a message or a text is bytes."""
    place = 0
    while place < len(data):
        tag, place = read_varint(data, place)
        if tag & 7 == 0:
            value, place = read_varint(data, place)
            yield tag >> 3, value
        elif tag & 7 == 1:
            yield tag >> 3, int.from_bytes(data[place : place + 8], "little")
            place += 8
        else:
            length, place = read_varint(data, place)
            yield tag >> 3, data[place : place + length]
            place += length


@given(FIELDS, st.integers(0, 2**64 - 1), st.text(max_size=300))
def test_single_fields_are_decoded_as_they_were_written(field: int, number: int, text: str) -> None:
    data = number_field(field, number) + text_field(field, text) + bytes_field(field, b"")
    assert list(decoded(data)) == [(field, number), (field, text.encode()), (field, b"")]


@given(FIELDS, NUMBERS)
def test_columns_of_numbers_are_decoded_as_they_were_written(
    field: int, numbers: list[int]
) -> None:
    column = np.array(numbers, np.uint64)
    encoded = beside(number_column(field, column), fixed64_column(field, column)).tobytes()
    assert list(decoded(encoded)) == [(field, number) for number in numbers for _ in range(2)]


@given(NUMBERS)
def test_message_in_each_row_has_the_number_of_the_row_and_the_constant(
    numbers: list[int],
) -> None:
    content = number_column(3, np.array(numbers, np.uint64))
    encoded = message_column(7, constant(text_field(2, "x" * 200)), content).tobytes()
    messages = [(field, list(decoded(message))) for field, message in decoded(encoded)]
    assert messages == [(7, [(2, b"x" * 200), (3, number)]) for number in numbers]


@given(st.permutations(range(7)))
def test_interleaved_rows_are_in_the_given_order(order: list[int]) -> None:
    short = number_column(1, np.arange(3, dtype=np.uint64))
    long = fixed64_column(2, np.arange(3, 7, dtype=np.uint64))
    encoded = interleaved(np.array(order), short, long)
    assert [value for _, value in decoded(encoded)] == list(order)
