"""Values that both machines read, and the queries of their trees."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from memory.load.trees import HAS_NATIVE, MACHINES, NEEDS_NATIVE, Read, event, handles, reader

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
