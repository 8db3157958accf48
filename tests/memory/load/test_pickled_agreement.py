"""Both machines give the same result for every file, and Python's unpickler for valid files."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory.load.trees import NEEDS_NATIVE, SNAPSHOT, agreed, facts, trusted

from cudakit.memory.load import pickled

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
    b"\x8c\1a\x94", b"K\1\x94", b"]\x94", b"}\x94", b"(}\x94(h\0K\1h\0]\x94(h\0h\1eue",
    b"}\x94(h\1J\1\0\0\0h\2]\x94(h\3j\1\0\0\0eh\0\x8a\1\xffu", b"h\3h\4h\5",
]  # fmt: skip


@NEEDS_NATIVE
@settings(deadline=None)
@given(words=st.lists(st.sampled_from(_WORDS), max_size=60))
@example(words=[b"]", b"q\0", b"h\0", b"a"])
@example(words=[b"]", b"q\0", *[b"h\0h\0\x86q\0"] * 40])
def test_both_machines_agree_on_arbitrary_programs(words: list[bytes]) -> None:
    agreed(b"\x80\4]}N" + b"".join(words) + b".")


def _dict_with_list(key: bytes) -> bytes:
    return b"}\x94(" + key + b"K\1" + key + b"]\x94(h\0eu"


# Stores the texts "a" and "b" in the memo, and begins a list.
_TWO_TEXTS = b"\x80\4(\x8c\1a\x94\x8c\1b\x94"


@NEEDS_NATIVE
@pytest.mark.parametrize(
    "opcodes",
    [
        pytest.param(
            _dict_with_list(b"h\1") * 3 + b"h\2h\3h\6h\7", id="memo values of dictionaries"
        ),
        pytest.param(
            _dict_with_list(b"h\1") + b"N\x94" + _dict_with_list(b"h\0"), id="memoized None"
        ),
        pytest.param(b"K\7\x94" + _dict_with_list(b"h\2"), id="number as key"),
        pytest.param(b"C\1c\x94" + _dict_with_list(b"h\2"), id="bytes as key"),
        pytest.param(b"]\x94" + _dict_with_list(b"h\2"), id="list as key"),
        pytest.param(_dict_with_list(b"h\1") * 2 + _dict_with_list(b"h\2"), id="dictionary as key"),
        pytest.param(_dict_with_list(b"h\x09"), id="missing key"),
        pytest.param(b"}\x94(h\1]\x94(h\2h\3eu", id="dictionary in its own list"),
        pytest.param(b"Nq\x05" + _dict_with_list(b"h\1") * 3 + b"h\5", id="memo with a gap"),
        pytest.param(_dict_with_list(b"\x8c\1d\x94") * 3 + b"h\2h\3h\4h\5h\6h\x0e", id="new texts"),
        pytest.param(b"}\x94(h\0\x8c\2\xc3\xa9\x94h\1Nu" * 2 + b"h\3h\5", id="text beyond ASCII"),
        pytest.param(b"}\x94(h\0\x8c\3\xed\xa0\x80\x94h\1Nu" * 2 + b"h\3", id="lone surrogate"),
        pytest.param(b"}\x94(h\0Nh\1\x88u}\x94(h\0\x89h\1Nuh\2h\3", id="None, True and False"),
        pytest.param(
            b"}\x94(h\0K\x94h\1J\x94\x94\x94\x94u" * 9 + b"h\x0a" + b"N\x94h\x0b",
            id="arguments that equal MEMOIZE",
        ),
        pytest.param(
            _dict_with_list(b"h\0") + b"\x8c\1cq\0" + _dict_with_list(b"h\0"), id="replaced key"
        ),
        pytest.param(
            _dict_with_list(b"h\0") + b"\x8c\1cq\2h\2" + _dict_with_list(b"h\2"),
            id="replaced dictionary",
        ),
        pytest.param(_dict_with_list(b"h\1") + b"h\3K\1ah\3", id="list extended later"),
        pytest.param(b"}\x94(h\0h\1h\0]\x94(eu", id="empty list"),
        pytest.param(b"}\x94(" + b"h\0K\1" * 200 + b"h\1]\x94(eu", id="200 keys"),
        pytest.param(b"}\x94(h\0]\x94(" + b"h\1" * 3000 + b"eu", id="list of 3,000 values"),
        pytest.param(_dict_with_list(b"h\1") * 5000, id="5,000 dictionaries"),
        pytest.param(b"}\x94(h\0K\1h\0]\x94(h\0e", id="no end"),
    ],
)
def test_both_machines_read_runs_of_dictionaries_alike(opcodes: bytes) -> None:
    agreed(_TWO_TEXTS + opcodes + b"l.")
