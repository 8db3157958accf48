"""Profiles of JAX: protocol buffers that are written here as jaxlib/pprof_profile_builder.cc does."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.errors import InputError
from cudakit.memory.jax_profile import Sample, arrays_of_message, read_profile
from cudakit.stacks import Frame

STRINGS = ["", "count", "bytes", "kind", "buffer", "device", "cuda:0", "relu", "model.py", "executable",
           "main"]  # fmt: skip
STACK = (Frame("relu", "model.py", 7), Frame("main", "model.py", 70))


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    result = b""
    while value > 0x7F:
        result += bytes([value & 0x7F | 0x80])
        value >>= 7
    return result + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def sample(count: int, size: int, device: str = "cuda:0", *, is_packed: bool = True) -> bytes:
    locations, values = (1, 2), (count, count * size)
    parts = [
        message(1, b"".join(map(varint, locations))) if is_packed
        else b"".join(number(1, each) for each in locations),
        message(2, b"".join(map(varint, values))) if is_packed
        else b"".join(number(2, each) for each in values),
    ]  # fmt: skip
    labels = {3: "buffer", 5: device} if device else {3: "executable"}
    parts += (
        message(3, number(1, key) + number(2, STRINGS.index(text))) for key, text in labels.items()
    )
    return message(2, b"".join(parts))


def profile(*samples: bytes) -> bytes:
    functions = [(1, "relu"), (2, "main")]
    parts = [
        *samples,
        *(message(4, number(1, each) + message(4, number(1, each) + number(2, line)))
          for each, line in ((1, 7), (2, 70))),
        *(message(5, number(1, each) + number(2, STRINGS.index(name)) + number(3, 0) + number(4, 8))
          for each, name in functions),
        *(message(6, text.encode()) for text in STRINGS),
        number(12, 1),
    ]  # fmt: skip
    return b"".join(parts)


@pytest.mark.parametrize("is_packed", [True, False])
def test_profile_has_samples_with_call_stacks(is_packed: bool) -> None:
    content = profile(sample(2, 400, is_packed=is_packed), sample(1, 9, ""))

    expected = [
        Sample(2, 800, STACK, {"kind": "buffer", "device": "cuda:0"}),
        Sample(1, 9, STACK, {"kind": "executable"}),
    ]
    assert read_profile(content) == expected
    assert read_profile(gzip.compress(content)) == expected


def arrays(content: bytes, buffers: list[list[int]]) -> object:
    text = json.dumps(
        {
            "time_ns": 5,
            "profile": b64encode(content).decode(),
            "buffers": buffers,
            "devices": {"0": 1},
        }
    )
    return arrays_of_message(text)


def test_arrays_have_addresses_of_buffers_of_their_size() -> None:
    content = profile(sample(2, 400), sample(1, 64))

    assert arrays(content, [[1, 1000, 400], [1, 2000, 64], [1, 3000, 400], [1, 4000, 8]]) == (
        5,
        {
            (1, 1000): (400, STACK), (1, 3000): (400, STACK), (1, 2000): (64, STACK),
            (1, 4000): (8, ()),
        },
    )  # fmt: skip


def test_executables_and_arrays_without_buffer_are_left_out() -> None:
    assert arrays(profile(sample(1, 9, ""), sample(3, 400)), [[1, 1000, 400]]) == (
        5,
        {(1, 1000): (400, STACK)},
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"time_ns": 1, "profile": "A", "devices": {}}'])
def test_damaged_message_is_an_input_error(text: str) -> None:
    with pytest.raises(InputError):
        arrays_of_message(text)


@given(st.integers(0, 400), st.integers(0, 255))
def test_changed_byte_raises_nothing_but_input_errors(place: int, byte: int) -> None:
    content = bytearray(profile(sample(2, 400)))
    content[place % len(content)] = byte
    with suppress(InputError):
        read_profile(bytes(content))


def test_truncated_profile_is_an_input_error() -> None:
    content = gzip.compress(profile(sample(2, 400)))

    with pytest.raises(InputError, match="truncated"):
        read_profile(content[:-9])
