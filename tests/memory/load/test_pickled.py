"""Values that both machines read, and the queries of their trees."""

from __future__ import annotations

import math
import pickle
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory.load.trees import (
    HAS_NATIVE,
    MACHINES,
    NEEDS_NATIVE,
    SNAPSHOT,
    Read,
    agreed,
    event,
    facts,
    handles,
    outcome,
    reader,
    trusted,
)

from cudakit.errors import SnapshotError
from cudakit.memory.load import pickled
from cudakit.memory.load.tree import ObjectTree


@pytest.fixture(params=MACHINES)
def read(request: pytest.FixtureRequest) -> Read:
    return reader(native=request.param)


# Values.


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("count", [999, 1000, 1001, 2500])
def test_containers_longer_than_a_batch_are_complete(read: Read, count: int, protocol: int) -> None:
    value = {"list": [[i] for i in range(count)], "dict": {str(i): i for i in range(count)}}
    tree = read(pickle.dumps(value, protocol))
    assert tree.plain_object(tree.root) == value


def test_lists_that_grow_alternately_do_not_overlap(read: Read) -> None:
    # Two lists, at memo indices 0 and 1, get one item each in turn.
    turns = b"".join(b"h\0K%ca0h\1K%ca0" % (i, 255 - i) for i in range(250))
    tree = read(b"\x80\2]q\0]q\1" + turns + b"h\0h\1\x86.")
    up, down = tree.plain_object(tree.root)
    assert up == list(range(250))
    assert down == list(range(255, 5, -1))


@pytest.mark.parametrize(
    ("number", "read_as"),
    [
        (-(1 << 63), -(1 << 63)),
        ((1 << 63) - 1, (1 << 63) - 1),
        ((1 << 64) - 1, -1),
        (True, 1),
        (False, 0),
    ],
)
@pytest.mark.parametrize("protocol", range(6))
def test_integers_from_2_to_the_63_on_wrap(
    read: Read, number: int, read_as: int, protocol: int
) -> None:
    tree = read(pickle.dumps(number, protocol))
    numbers, known = tree.integers(handles(tree.root))
    assert (numbers.tolist(), known.tolist()) == ([read_as], [True])


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, 1 << 9_999, 1.0, "1", None, b"1", [1]])
def test_integers_beyond_64_bits_are_not_integers(read: Read, value: Any) -> None:
    tree = read(pickle.dumps(value, 4))
    numbers, known = tree.integers(handles(tree.root, 0))
    assert (numbers.tolist(), known.tolist()) == ([0, 0], [False, False])
    assert tree.plain_object(tree.root) == value


def test_redundant_sign_bytes_do_not_change_an_integer(read: Read) -> None:
    tree = read(b"\x80\2(K\x07\x8a\x09\7\0\0\0\0\0\0\0\0\x8a\3\xff\xff\xff\x8a\1\xff\x8a\0K\0t.")
    assert tree.plain_object(tree.root) == [7, 7, -1, -1, 0, 0]
    assert tree.intern(tree.children(handles(tree.root))[1])[0].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("pickle_of_text", "text"),
    [
        (b"\x8c\3a\xffb.", "a\\xffb"),
        (b"X\3\0\0\0\xed\xa0\x80.", "\\xed\\xa0\\x80"),
        (b"V\\ud800\\u00e9\xe9\n.", "\\ud800éé"),
        (b"V\\u12\n.", "\\x5c\\x75\\x31\\x32"),
        (b"U\2a\xe9.", "aé"),
        (b"T\1\0\0\0\xe9.", "é"),
        (b"S'a\\'b'\n.", "a\\'b"),
        (b'S""\n.', ""),
    ],
)
def test_invalid_utf_8_becomes_escapes(read: Read, pickle_of_text: bytes, text: str) -> None:
    tree = read(pickle_of_text)
    found = tree.plain_object(tree.root)
    assert found == text
    assert isinstance(found.encode(), bytes)


def test_repeated_key_has_its_last_value_and_first_position(
    read: Read,
) -> None:
    tree = read(b"\x80\4}(\x8c\1aK\1\x8c\1bK\2\x8c\1aK\3u.")
    assert list(tree.plain_object(tree.root).items()) == [("a", 3), ("b", 2)]
    assert tree.plain_object(int(tree.column(handles(tree.root), "a")[0])) == 3


def test_content_of_a_dictionary_uses_the_last_value_of_each_key(read: Read) -> None:
    one, two = b"\x8c\1aK\1", b"\x8c\1aK\2"
    dicts = (one + two, two, two + one, one, one + two + one, b"\x8c\1bK\1" + two)
    tree = read(b"\x80\4(" + b"".join(b"}(" + pairs + b"u" for pairs in dicts) + b"l.")
    ids, _ = tree.intern(tree.children(handles(tree.root))[1])
    assert ids.tolist() == [0, 0, 1, 1, 1, 2]


def test_memoize_uses_the_number_of_memo_entries(read: Read) -> None:
    # The empty list is stored twice at index 0, so 7 gets index 1 and 8 gets index 2.
    tree = read(b"\x80\4]q\0q\0K\7\x94K\x08\x94h\2h\1h\0\x87.")
    assert tree.plain_object(tree.root) == [8, 7, []]
    # Indices 0 to 3 are unused, but 7 gets index 1: the number of entries.
    tree = read(b"\x80\4]q\4K\7\x94h\1.")
    assert tree.plain_object(tree.root) == 7


def test_empty_texts_are_equal_and_found_as_keys(read: Read) -> None:
    # The second text is empty after conversion: it has no bytes in the file.
    tree = read(b"\x80\2}(\x8c\0K\1V\nK\2u.")
    assert tree.members(tree.root).keys() == {""}
    found = tree.column(handles(tree.root), "")
    assert tree.integers(found)[0].tolist() == [2]


def test_key_that_is_not_text_is_dropped(read: Read) -> None:
    tree = read(b"\x80\4}(K\1K\1N]\x8c\1a}]\x8c\1b)NG" + bytes(8) + b"NC\1xNu.")
    assert tree.plain_object(tree.root) == {"a": {}}


def test_bytes_after_the_end_of_the_pickle_are_ignored(read: Read) -> None:
    tree = read(pickle.dumps([1]) + b"cos\nsystem\n")
    assert tree.plain_object(tree.root) == [1]


def test_leftover_stack_values_and_marks_are_ignored(read: Read) -> None:
    tree = read(b"\x80\4N(K\1K\2" + b"1" + b"(0K\3K\4" + b"0.")
    assert tree.plain_object(tree.root) == 3


# Equal content.


def test_equal_stacks_have_equal_ids_without_the_memo(
    read: Read,
) -> None:
    events = [event("f"), event("g"), event("f", shuffled=True), event("g"), {}]
    # Without a memo nothing is shared.
    content = b"\x80\2(" + b"".join(pickle.dumps(e, 2)[2:-1] for e in events) + b"l."
    tree = read(content)
    frames = tree.column(tree.children(handles(tree.root))[1], "frames")
    ids, first = tree.intern(frames)
    assert ids.tolist() == [0, 1, 0, 1, 2]
    assert first.tolist() == [frames[0], frames[1], 0]


def test_values_of_different_types_have_different_ids(read: Read) -> None:
    groups = [
        [1], [True], [1.0], ["1"], [b"1"], [[1], (1,)], [None], [0], [False], [-0.0], [0.0],
        [math.nan, math.nan], [[], ()], [{}], [{"a": 1}], [{"a": True}], [[[1]], ((1,),)], [""],
    ]  # fmt: skip
    tree = read(pickle.dumps([value for group in groups for value in group], 4))
    ids, _ = tree.intern(tree.children(handles(tree.root))[1])
    assert ids.tolist() == [number for number, group in enumerate(groups) for _ in group]


def test_content_is_compared_four_levels_deep(
    read: Read,
) -> None:
    shared = [1]
    five = [[[[shared]]]]
    values = [[[[[1]]]], [[[[1]]]], five, [[[[shared]]]], [[[[[1]]]]], five[0]]
    # The last node is also inside the third one, at another depth; the order must not matter.
    for order, expected in ((values, [0, 0, 1, 1, 2, 0]), (values[::-1], [0, 1, 2, 2, 0, 0])):
        tree = read(pickle.dumps(order, 4))
        ids, _ = tree.intern(tree.children(handles(tree.root))[1])
        assert ids.tolist() == expected


# Queries.


def test_kind_error_names_the_found_kind(read: Read) -> None:
    tree = read(pickle.dumps([[], {}, "a", 1, True, None, 1.0, b"a"], 4))
    items = tree.children(handles(tree.root))[1]
    kinds = [
        "a list",
        "a dictionary",
        "text",
        "an integer",
        "True or False",
        "None",
        "a number",
        "bytes",
    ]
    for item, kind in zip(items.tolist(), kinds, strict=True):
        assert tree.is_list(item) == (kind == "a list")
        if kind != "a list":
            with pytest.raises(SnapshotError, match=f"has {kind} where .* has a list"):
                tree.children(handles(0, item))
        if kind != "a dictionary":
            with pytest.raises(SnapshotError, match=f"has {kind} where .* has a dictionary"):
                tree.column(handles(item), "a")
            with pytest.raises(SnapshotError, match=f"has {kind} where .* has a dictionary"):
                tree.members(item)


def test_handle_0_has_no_items_and_is_not_a_dictionary(read: Read) -> None:
    tree = read(b"].")
    counts, children = tree.children(handles(0, tree.root, 0))
    assert (counts.tolist(), children.tolist()) == ([0, 0, 0], [])
    assert not tree.is_list(0)
    assert tree.plain_object(0) is None
    with pytest.raises(SnapshotError, match="has None where"):
        tree.column(handles(0), "a")


def test_empty_arrays_of_handles_give_empty_results(read: Read) -> None:
    tree = read(b"].")
    none = handles()
    assert [len(part) for part in tree.children(none)] == [0, 0]
    assert [len(part) for part in tree.integers(none)] == [0, 0]
    assert [len(part) for part in tree.intern(none)] == [0, 0]
    assert len(tree.column(none, "a")) == 0


def test_non_contiguous_arrays_of_handles_are_accepted(read: Read) -> None:
    tree = read(pickle.dumps(list(range(10))))
    children = tree.children(handles(tree.root))[1]
    assert tree.integers(children[::3])[0].tolist() == [0, 3, 6, 9]
    assert tree.integers(children[::-1])[0].tolist() == list(range(9, -1, -1))


@NEEDS_NATIVE
@pytest.mark.parametrize("handle", [1, *((tag << 60) + 3 for tag in range(16) if tag != 2)])
def test_invalid_handle_raises_index_error(handle: int) -> None:
    tree = pickled.read(b"\x80\4]}\x8c\1aNs\x86.", native=True)
    for answer in (tree.plain_object, tree.is_list, tree.members):
        with pytest.raises(IndexError):
            answer(handle)
    for many in (tree.children, tree.integers, tree.intern, lambda h: tree.column(h, "a")):
        with pytest.raises(IndexError):
            many(handles(handle))


@NEEDS_NATIVE
def test_compiled_queries_reject_result_arrays_that_are_too_short() -> None:
    from cudakit.memory.load._pickled import PickledTree

    nodes = PickledTree(b"](K\1K\2K\3e.", b"", lambda _opcode, _raw: True, 1 << 20, 1)
    root, none, one = handles(nodes.root), np.empty(0, np.uint64), np.empty(1, np.uint64)
    with pytest.raises(IndexError, match="space"):
        nodes.gather(root, np.empty(2, np.uint64))
    for fill in (nodes.lengths, lambda *some: nodes.column(*some, "a")):
        with pytest.raises(TypeError, match="too short"):
            fill(root, none)
    for fill in (nodes.integers, nodes.intern):
        for arrays in ((one, none), (none, one)):
            with pytest.raises(TypeError, match="too short"):
                fill(root, *arrays)
    with pytest.raises(TypeError, match="not aligned"):
        nodes.lengths(np.frombuffer(bytes(9), np.uint8)[1:], one)


@pytest.mark.skipif(HAS_NATIVE, reason="the native machine was built")
def test_native_true_without_the_compiled_reader_raises_import_error() -> None:
    with pytest.raises(ImportError):
        pickled.read(b"N.", native=True)


@NEEDS_NATIVE
def test_compiled_reader_is_used_by_default() -> None:
    assert not isinstance(pickled.read(b"N."), ObjectTree)
    assert isinstance(pickled.read(b"N.", native=False), ObjectTree)


# --- Files that both machines reject, with bounded time and memory ---------------------------------

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


# --- Both machines give the same result for every file, and Python's unpickler for valid files -----

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
