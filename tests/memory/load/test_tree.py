"""The queries of a Tree, for both classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory.load.files import pickled as as_pickle

from cudakit.errors import SnapshotError
from cudakit.memory.load import pickled
from cudakit.memory.load.tree import Budget, Handles, ObjectTree, Tree

Grow = Callable[[Any], Tree]

SIZE = 1000


def from_objects(root: Any) -> Tree:
    return ObjectTree(root, Budget(SIZE, SIZE))


def from_pickle(root: Any) -> Tree:
    return pickled.read(as_pickle(root))


def from_pickle_in_python(root: Any) -> Tree:
    return pickled.read(as_pickle(root), native=False)


EVERY = pytest.mark.parametrize("grow", [from_objects, from_pickle, from_pickle_in_python])

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"), max_size=5)
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=2), inner),
    max_leaves=12,
)


def handles(*found: int) -> Handles:
    return np.array(found, np.uint64)


def root_of(tree: Tree) -> Handles:
    return handles(tree.root)


def items(tree: Tree) -> Handles:
    return tree.children(root_of(tree))[1]


def shape(node: Any) -> Any:
    """Return a form of a value in which 1, 1.0 and True differ."""
    if isinstance(node, dict):
        return {key: shape(value) for key, value in node.items()}
    if isinstance(node, list):
        return [shape(item) for item in node]
    return type(node).__name__, repr(node)


@EVERY
@given(root=trees)
@settings(max_examples=30, deadline=None)
def test_plain_returns_the_original_objects(grow: Grow, root: Any) -> None:
    tree = grow(root)
    assert shape(tree.plain_object(tree.root)) == shape(root)


@EVERY
@given(nodes=st.lists(trees, max_size=6))
@settings(max_examples=20, deadline=None)
def test_nodes_of_equal_content_have_equal_ids(grow: Grow, nodes: list[Any]) -> None:
    tree = grow([*nodes, *nodes])
    ids, firsts = tree.intern(items(tree))
    # Frames need two levels; deeper nodes may count as different.
    flat = [i for i, node in enumerate(nodes) if _depth(node) <= 2]
    for i in flat:
        assert ids[i] == ids[i + len(nodes)]
        for j in flat:
            assert (ids[i] == ids[j]) == (shape(nodes[i]) == shape(nodes[j]))
    if nodes:
        assert ids[0] == 0
        steps = np.diff(np.maximum.accumulate(ids))
        assert set(steps.tolist()) <= {0, 1}
    assert len(firsts) == len(set(ids.tolist()))
    assert tree.intern(firsts)[0].tolist() == list(range(len(firsts)))


def _depth(node: Any) -> int:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return 1 + max(map(_depth, inner), default=0) if isinstance(node, (dict, list)) else 0


@EVERY
def test_tuple_is_a_list(grow: Grow) -> None:
    tree = grow(((1, 2), [1, 2], "12", {}))
    assert [tree.is_list(int(handle)) for handle in items(tree)] == [True, True, False, False]
    counts, inner = tree.children(items(tree)[:2])
    assert counts.tolist() == [2, 2]
    assert [tree.plain_object(int(handle)) for handle in inner] == [1, 2, 1, 2]


@EVERY
def test_handle_0_is_an_empty_list(grow: Grow) -> None:
    tree = grow([[5], []])
    first, second = items(tree).tolist()
    counts, inner = tree.children(handles(0, first, 0, second))
    assert counts.tolist() == [0, 1, 0, 0]
    assert len(inner) == 1


@EVERY
def test_column_is_zero_if_the_key_is_missing(grow: Grow) -> None:
    tree = grow([{"a": 1, "b": 2}, {}, {"b": None}])
    values = tree.column(items(tree), "b")
    assert (values != 0).tolist() == [True, False, True]
    numbers, known = tree.integers(values)
    assert (numbers.tolist(), known.tolist()) == ([2, 0, 0], [True, False, False])


@EVERY
@pytest.mark.parametrize(
    ("value", "wrapped"),
    [
        (0, 0),
        (-1, -1),
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (2**63, -(2**63)),
        (2**64 - 1, -1),
        (True, 1),
        (2**64, None),
        (-(2**63) - 1, None),
        (2**70, None),
        (1.0, None),
        ("1", None),
        (None, None),
        ([1], None),
        ({}, None),
    ],
)
def test_integers_of_64_bits_wrap_and_other_values_are_unknown(
    grow: Grow, value: Any, wrapped: int | None
) -> None:
    tree = grow([value])
    numbers, known = tree.integers(items(tree))
    assert (numbers.dtype, known.dtype) == (np.int64, np.bool_)
    assert known.tolist() == [wrapped is not None]
    assert numbers.tolist() == [wrapped or 0]


@EVERY
def test_members_maps_keys_to_handles(grow: Grow) -> None:
    tree = grow({"a": 1, "": 2})
    found = tree.members(tree.root)
    assert {key: tree.plain_object(handle) for key, handle in found.items()} == {"a": 1, "": 2}


@EVERY
@pytest.mark.parametrize("value", [5, "text", None, 1.5, {}])
def test_children_of_a_scalar_are_rejected(grow: Grow, value: Any) -> None:
    tree = grow([value])
    with pytest.raises(SnapshotError, match="where a memory snapshot has a list"):
        tree.children(items(tree))


@EVERY
@pytest.mark.parametrize("value", [5, "text", None, 1.5, []])
def test_members_of_a_scalar_are_rejected(grow: Grow, value: Any) -> None:
    tree = grow([value])
    with pytest.raises(SnapshotError, match="where a memory snapshot has a dictionary"):
        tree.column(items(tree), "key")
    with pytest.raises(SnapshotError, match="where a memory snapshot has a dictionary"):
        tree.members(int(items(tree)[0]))


@EVERY
def test_items_of_all_calls_together_are_limited(grow: Grow) -> None:
    shared = list(range(100))
    tree = grow([shared] * 80)
    lists = items(tree)
    tree.children(lists)
    with pytest.raises(SnapshotError, match="describes more"):
        tree.children(lists)


@EVERY
def test_plain_rejects_more_than_10_000_items(grow: Grow) -> None:
    largest = grow([list(range(99))] * 100)
    assert largest.plain_object(largest.root) == [list(range(99))] * 100
    larger = grow([list(range(100))] * 100)
    with pytest.raises(SnapshotError, match="more than 10,000 values"):
        larger.plain_object(larger.root)


@EVERY
def test_members_rejects_more_than_10_000_keys(grow: Grow) -> None:
    largest, larger = (grow({str(i): i for i in range(n)}) for n in (10_000, 10_001))
    assert len(largest.members(largest.root)) == 10_000
    with pytest.raises(SnapshotError, match="more than 10,000 keys"):
        larger.members(larger.root)


@EVERY
def test_texts_returns_the_empty_text_for_other_nodes(grow: Grow) -> None:
    tree = grow(["a", 1, None, ["b"], {"c": "d"}, "é"])
    assert tree.texts(np.append(items(tree), np.uint64(0))) == ["a", "", "", "", "", "é", ""]


@EVERY
def test_deeply_nested_nodes_are_rejected(grow: Grow) -> None:
    root: list[Any] = []
    for _ in range(150):
        root = [root]
    tree = grow(root)
    with pytest.raises(SnapshotError, match="nested deeper than 100"):
        tree.plain_object(tree.root)


@EVERY
def test_plain_rejects_a_list_that_contains_itself(grow: Grow) -> None:
    root: list[Any] = []
    root.append(root)
    tree = grow(root)
    assert tree.children(root_of(tree))[0].tolist() == [1]
    assert len(tree.intern(root_of(tree))[0]) == 1
    with pytest.raises(SnapshotError):
        tree.plain_object(tree.root)


@EVERY
def test_empty_arrays_of_handles_give_empty_results(grow: Grow) -> None:
    tree, none = grow([]), handles()
    assert [len(part) for part in tree.children(none)] == [0, 0]
    assert len(tree.column(none, "key")) == 0
    assert [len(part) for part in tree.integers(none)] == [0, 0]
    assert [len(part) for part in tree.intern(none)] == [0, 0]


# --- The error for a file that describes more than its size allows ---------------------------------

_MIB = 1 << 20


@pytest.mark.parametrize(
    ("file_bytes", "content_bytes", "size_text", "hint"),
    [
        (7_171, 7_171, "(7,171 bytes)", "write the snapshot again"),
        (771, 209_806, "(771 bytes, 209,806 decompressed)", "write the snapshot again"),
        (
            _MIB,
            50 * _MIB,
            "(1,048,576 bytes, 52,428,800 decompressed)",
            "write the snapshot again; if you trust the file, decompress it first",
        ),
    ],
)
def test_hint_names_decompression_only_if_it_raises_the_limit(
    file_bytes: int, content_bytes: int, size_text: str, hint: str
) -> None:
    with pytest.raises(SnapshotError) as caught:
        Budget(file_bytes, content_bytes).spend_rows(1 << 40)
    assert size_text in str(caught.value)
    assert caught.value.hint == hint
