"""Both machines give the same result for every file, and Python's unpickler for valid files."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import pytest
from core.memory.load.trees import NEEDS_NATIVE, SNAPSHOT, agreed, facts, trusted
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cudakit.core.memory.load import pickled

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 1 << 59, -(1 << 59) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63)])
    | st.floats()
    | st.text()
    | st.sampled_from(["", "name", "line", "\n\\u0041\\", "é", "\U0001f600", "\x1a\0"])
)
VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        # All empty tuples of Python are one object; as nodes of a file they are not.
        | st.lists(inner, min_size=1, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=25,
)


@NEEDS_NATIVE
@given(value=VALUES, protocol=st.integers(0, 5))
def test_both_machines_read_the_same_values_as_pickle(value: Any, protocol: int) -> None:
    content = pickle.dumps(value, protocol)
    assert agreed(content) == facts(trusted(content))


@given(value=VALUES, protocol=st.integers(0, 5))
def test_python_machine_reads_the_same_values_as_pickle(value: Any, protocol: int) -> None:
    content = pickle.dumps(value, protocol)
    tree = pickled.read(content, native=False)
    assert facts(tree) == facts(trusted(content))


@NEEDS_NATIVE
@pytest.mark.parametrize("opcode", range(256))
def test_both_machines_accept_the_same_opcodes(opcode: int) -> None:
    for before in (b"", b"\x80\4N", b"\x80\4N(]}NN"):
        for after in (b".", b"\0\0\0\0\0\0\0\0\0\0N.", b"1\n."):
            agreed(before + bytes([opcode]) + after)


@NEEDS_NATIVE
@given(
    protocol=st.integers(0, 5),
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=6),
)
def test_both_machines_agree_on_mutated_files(
    protocol: int, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(pickle.dumps(SNAPSHOT, protocol))
    for place, byte in changes:
        content[place % len(content)] = byte
    agreed(bytes(content))


_WORDS = [
    *(b"%c" % opcode for opcode in b"(]})NldtaesuN012\x85\x86\x87\x88\x89\x94"),
    b"K\1", b"K\2", b"M\1\1", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\0",
    b"\x8a\x09" + b"\xff" * 8 + b"\1", b"G" + struct.pack(">d", 1.0), b"\x8c\1a", b"U\1b",
    b"X\4\0\0\0name", b"\x8c\2\xc3\xa9", b"\x8c\1\xff", b"C\1a", b"B\0\0\0\0", b"I01\n", b"I7\n",
    b"L7L\n", b"L" + b"9" * 30 + b"\n", b"F1.0\n", b"Va\n", b"S'a'\n",
    b"q\0", b"q\1", b"q\2", b"h\0", b"h\1", b"h\2", b"h\2h\2h\2", b"p3\n", b"g3\n",
    b"r\4\0\0\0", b"j\4\0\0\0", b"(h\0h\0h\0l", b"(h\1h\1e", b"(\x8c\1aNu", b"\x8c\1aKas",
]  # fmt: skip


@NEEDS_NATIVE
@settings(deadline=None)
@given(words=st.lists(st.sampled_from(_WORDS), max_size=60))
@example(words=[b"]", b"q\0", b"h\0", b"a"])
@example(words=[b"]", b"q\0", *[b"h\0h\0\x86q\0"] * 40])
def test_both_machines_agree_on_arbitrary_programs(words: list[bytes]) -> None:
    agreed(b"\x80\4]}N" + b"".join(words) + b".")
