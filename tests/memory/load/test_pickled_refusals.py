"""Files that both machines reject, with bounded time and memory."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from memory.load.trees import MACHINES, NEEDS_NATIVE, SNAPSHOT, Read, handles, outcome, reader

from cudakit.errors import SnapshotError
from cudakit.memory.load import pickled


@pytest.fixture(params=MACHINES)
def read(request: pytest.FixtureRequest) -> Read:
    return reader(native=request.param)


# Rejected opcodes and damage.


_REFUSED = {
    "GLOBAL": b"cos\nsystem\n", "STACK_GLOBAL": b"\x8c\2os\x8c\6system\x93", "REDUCE": b"N)R",
    "BUILD": b"N}b", "INST": b"(ios\nsystem\n", "OBJ": b"(No", "NEWOBJ": b"N)\x81",
    "NEWOBJ_EX": b"N)}\x92", "EXT1": b"\x82\1", "EXT2": b"\x83\1\0", "EXT4": b"\x84\1\0\0\0",
    "PERSID": b"Pid\n", "BINPERSID": b"NQ", "EMPTY_SET": b"\x8f", "ADDITEMS": b"(\x90",
    "FROZENSET": b"(\x91", "BYTEARRAY8": b"\x96" + bytes(8), "NEXT_BUFFER": b"\x97",
    "READONLY_BUFFER": b"\x98",
}  # fmt: skip


@pytest.mark.parametrize("name", _REFUSED)
def test_opcode_that_is_not_plain_data_is_rejected_by_name(read: Read, name: str) -> None:
    with pytest.raises(SnapshotError, match=f"^byte [0-9]+: opcode {name} .*nothing was loaded$"):
        read(b"\x80\4" + _REFUSED[name] + b".")


def test_rejection_has_the_offset_and_a_hint(read: Read) -> None:
    with pytest.raises(SnapshotError) as refusal:
        read(b"\x80\2cos\nsystem\n.")
    assert refusal.value.message == (
        "byte 2: opcode GLOBAL names or calls a class or function; "
        "a memory snapshot holds only plain data, so nothing was loaded"
    )
    assert "_dump_snapshot" in refusal.value.hint


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code of the file was run",))


@pytest.mark.parametrize("protocol", range(6))
def test_object_inside_plain_data_is_rejected(read: Read, protocol: int) -> None:
    with pytest.raises(SnapshotError, match="nothing was loaded"):
        read(pickle.dumps({"segments": [1, {"a": _Evil()}]}, protocol))


_DAMAGED = {
    b"\x80\2e.": "opcode APPENDS needs a MARK",
    b"\x80\2(e.": "opcode APPENDS needs more values",
    b"\x80\2](a.": "opcode APPEND needs more values",
    b"\x80\2]((e.": "opcode APPENDS needs more values",
    b"\x80\2}((u.": "opcode SETITEMS needs more values",
    b"\x80\2N(K": "is truncated",
    b"\x80\2N(e.": "opcode APPENDS adds items to a value that cannot hold them",
    b"\x80\2NNa.": "opcode APPEND adds items to a value that cannot hold them",
    b"\x80\2](NNu.": "opcode SETITEMS adds items to a value that cannot hold them",
    b"\x80\2}(Nu.": "opcode SETITEMS has a key without a value",
    b"\x80\2(Nd.": "opcode DICT has a key without a value",
    b"\x80\2N\x86.": "opcode TUPLE2 needs more values",
    b"\x80\2.": "opcode STOP needs more values",
    b"\x80\2N(.": "opcode STOP needs more values",
    b"\x80\2N(N\x86.": "opcode TUPLE2 needs more values",
    b"\x80\2" + b"0.": "opcode POP needs more values",
    b"\x80\2" + b"1.": "opcode POP_MARK needs a MARK",
    b"\x80\2" + b"2.": "opcode DUP needs more values",
    b"\x80\2q\0.": "opcode BINPUT needs more values",
    b"\x80\2\x94.": "opcode MEMOIZE needs more values",
    b"\x80\2h\0.": "opcode BINGET reads a memo entry that was not stored",
    b"\x80\2]q\3h\2.": "opcode BINGET reads a memo entry that was not stored",
    b"\x80\2]r\0\xc2\xeb\x0b.": "opcode LONG_BINPUT stores a memo entry whose index is too large",
    b"Np200000000\n.": "opcode PUT stores a memo entry whose index is too large",
    b"Np" + b"9" * 40 + b"\n.": "opcode PUT stores a memo entry whose index is too large",
    b"Np-1\n.": "opcode PUT has an invalid argument",
    b"g" + b"9" * 40 + b"\n.": "opcode GET reads a memo entry",
    b"I1_0\n.": "opcode INT has an invalid argument",
    b"I0x1\n.": "opcode INT has an invalid argument",
    b"I\n.": "opcode INT has an invalid argument",
    b"L-L\n.": "opcode LONG has an invalid argument",
    b"L" + b"9" * 5000 + b"L\n.": "opcode LONG has an invalid argument",
    b"F" + b"1" * 5000 + b"\n.": "opcode FLOAT has an invalid argument",
    b"Fx\n.": "opcode FLOAT has an invalid argument",
    b"Sx\n.": "opcode STRING has an invalid argument",
    b"S'\n.": "opcode STRING has an invalid argument",
    b"\x80\6N.": "opcode PROTO declares a protocol above 5",
    b"hello": "or not a pickle",
    b"\xff\xfe": "byte 0: 0xff is not an opcode",
    b"": "is truncated after 0 bytes",
    b"\x80\2N": "is truncated after 3 bytes",
    b"\x80\4\x95\3\0\0\0\0\0\0\0N.": "is truncated",
    b"I1": "is truncated",
}


@pytest.mark.parametrize(("content", "reason"), _DAMAGED.items())
def test_damaged_file_is_rejected_with_a_reason(read: Read, content: bytes, reason: str) -> None:
    with pytest.raises(SnapshotError) as refusal:
        read(content)
    assert reason in refusal.value.message
    assert refusal.value.hint


_LENGTHS = {
    b"X": 4, b"\x8d": 8, b"T": 4, b"U": 1, b"\x8c": 1, b"B": 4, b"C": 1, b"\x8e": 8,
    b"\x8a": 1, b"\x8b": 4, b"\x95": 8,
}  # fmt: skip


@pytest.mark.parametrize("opcode", _LENGTHS)
def test_declared_length_beyond_the_file_is_rejected(read: Read, opcode: bytes) -> None:
    for length in (b"\xff" * _LENGTHS[opcode], b"\xff" * (_LENGTHS[opcode] - 1) + b"\x7f"):
        with pytest.raises(SnapshotError, match="is truncated"):
            read(b"\x80\4" + opcode + length + b"abcdefgh.")


@pytest.mark.parametrize("protocol", range(6))
def test_truncated_pickle_is_rejected_at_every_length(read: Read, protocol: int) -> None:
    content = pickle.dumps(SNAPSHOT, protocol)
    for size in range(len(content)):
        with pytest.raises(SnapshotError, match=f"is truncated after {size} bytes"):
            read(content[:size])


# Files that expand.


def test_list_that_contains_itself_is_rejected_or_bounded(read: Read) -> None:
    loop: list[Any] = []
    loop += [loop, {"a": loop}, 1]
    tree = read(pickle.dumps(loop, 4))
    with pytest.raises(SnapshotError, match="more than 10,000 values"):
        tree.plain_object(tree.root)
    counts, children = tree.children(handles(tree.root))
    assert counts.tolist() == [3]
    assert tree.intern(children)[0].tolist() == [0, 1, 2]


def test_exponentially_shared_lists_are_rejected(
    read: Read,
) -> None:
    layers: list[Any] = ["x"] * 100
    for _ in range(12):
        layers = [layers] * 100
    tree = read(pickle.dumps(layers, 4))
    with pytest.raises(SnapshotError, match="more than 10,000 values"):
        tree.plain_object(tree.root)
    children = tree.children(handles(tree.root))[1]
    with pytest.raises(SnapshotError, match="describes more"):
        tree.children(np.repeat(children, 110))
    assert tree.intern(children)[0].tolist() == [0] * 100


def test_children_of_all_calls_together_are_limited_by_the_file_size(read: Read) -> None:
    # Bytes after the end of the pickle count. The root has 10 items, and its lists have 100,100.
    content = pickle.dumps([[0] * 10_010] * 10, 4)
    for size, fits in ((90_110, True), (90_109, False)):
        tree = read(content.ljust(size))
        lists = tree.children(handles(tree.root))[1]
        if fits:
            assert tree.children(lists)[0].sum() == 100_100
        else:
            with pytest.raises(SnapshotError, match="90,109 bytes"):
                tree.children(lists)


def test_million_levels_of_nesting_do_not_recurse(read: Read) -> None:
    tree = read(b"\x80\4N" + b"\x85" * 1_000_000 + b".")
    with pytest.raises(SnapshotError, match="deeper than 100 levels"):
        tree.plain_object(tree.root)
    assert tree.intern(handles(tree.root))[0].tolist() == [0]


def test_plain_rejects_more_than_100_levels(
    read: Read,
) -> None:
    deepest = read(b"\x80\4N" + b"\x85" * 99 + b".")
    value = deepest.plain_object(deepest.root)
    for _ in range(99):
        (value,) = value
    assert value is None
    deeper = read(b"\x80\4N" + b"\x85" * 100 + b".")
    with pytest.raises(SnapshotError, match="deeper than 100 levels"):
        deeper.plain_object(deeper.root)


@pytest.mark.parametrize("key", [b"N" + b"\x85" * 1_000_000, b")" + b"2\x86" * 100, b"]2a", b"}"])
def test_container_as_a_key_is_never_hashed(read: Read, key: bytes) -> None:
    tree = read(b"\x80\4}" + key + b"Ns\x8c\1aK\1s.")
    assert tree.plain_object(tree.root) == {"a": 1}


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x80\2]r\xff\xff\xff\x0f.",
        b"\x80\2" + b"]" * 20_000 + b".",
        b"\x80\2" + b"(" * 20_000 + b".",
        b"\x80\2N" + b"2" * 20_000 + b".",
        b"\x80\2(" + b"I1\n" * 10_000 + b"l.",
        b"\x80\2}" + b"".join(b"(\x8c\2%c%cNu" % divmod(i, 128) for i in range(5000)) + b".",
        b"\x80\2" + b"".join(b"]r" + struct.pack("<I", 4 * i) for i in range(5000)) + b".",
        b"\x80\2(" + b"U\1\xe9" * 10_000 + b"l.",
    ],
)
@NEEDS_NATIVE
def test_reader_memory_is_proportional_to_the_file(bomb: bytes) -> None:
    pickled.read(b"N.", native=True)
    tracemalloc.start()
    try:
        outcome(pickled.read, bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The first chunk of items has 1 MiB.
    assert peak < (2 << 20) + 80 * len(bomb)
