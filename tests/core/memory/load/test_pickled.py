"""Both machines read what Python's own unpickler reads, and end on everything that is hostile."""

from __future__ import annotations

import math
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cudakit.core.memory.load import pickled
from cudakit.core.memory.load.tree import Handles, ObjectTree, Tree
from cudakit.errors import SnapshotError

_HAS_NATIVE = find_spec("cudakit.core.memory.load._pickled") is not None
_needs_native = pytest.mark.skipif(not _HAS_NATIVE, reason="the native machine was not built")

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 1 << 59, -(1 << 59) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63)])
    | st.floats()
    | st.text()
    | st.sampled_from(["", "name", "line", "\n\\u0041\\", "é", "\U0001f600", "\x1a\0"])
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        # All empty tuples of Python are one object; as nodes of a file they are not.
        | st.lists(inner, min_size=1, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=25,
)


@pytest.fixture(params=[pytest.param(True, marks=_needs_native, id="native"), False])
def read(request: pytest.FixtureRequest) -> Callable[[bytes], Tree]:
    return lambda content: pickled.read(content, native=request.param)


def _handles(*handles: int) -> Handles:
    return np.array(handles, np.uint64)


def _outcome(answer: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return answer(*arguments)
    except SnapshotError as error:
        return error.message


def _listed(value: Any) -> Any:
    """Write a value down: tuples as lists, and 1, 1.0, True, NaN and -0.0 each in its own way."""
    if isinstance(value, (list, tuple)):
        return [_listed(item) for item in value]
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return repr(value)


def _facts(tree: Tree, most: int = 200) -> list[Any]:
    """Ask a tree everything, about nodes in the order in which they are reached."""
    nodes, facts = [tree.root], []
    for node in nodes:
        members = _outcome(tree.members, node)
        children = _outcome(tree.children, _handles(node))
        facts.append((tree.is_list(node), _listed(_outcome(tree.plain, node))))
        facts.append(list(members) if isinstance(members, dict) else members)
        facts.append(children[0].tolist() if isinstance(children, tuple) else children)
        if len(nodes) < most:
            nodes += members.values() if isinstance(members, dict) else []
            nodes += children[1].tolist() if isinstance(children, tuple) else []
    return [*facts, *_facts_of_many(tree, nodes)]


def _facts_of_many(tree: Tree, nodes: list[int]) -> list[Any]:
    dicts = [n for n in nodes if isinstance(_outcome(tree.members, n), dict)]
    lists = [0, *(n for n in nodes if tree.is_list(n))]
    ids, first = tree.intern(_handles(0, *nodes))
    numbers, known = tree.integers(_handles(0, *nodes))
    counts = _outcome(tree.children, _handles(*lists))
    columns = [
        [bool(found), found and _listed(_outcome(tree.plain, found))]
        for key in ("", "name", "a", "\ud800")
        for found in tree.column(_handles(*dicts), key).tolist()
    ]
    return [
        ids.tolist(),
        [[0, *nodes].index(node) for node in first.tolist()],
        numbers.tolist(),
        known.tolist(),
        counts[0].tolist() if isinstance(counts, tuple) else counts,
        _outcome(tree.column, _handles(*nodes), "a") if len(dicts) < len(nodes) else None,
        columns,
    ]


def _agreed(content: bytes) -> Any:
    """Read with both machines; what they say must be the same."""
    trees = [_outcome(lambda n=n: pickled.read(content, native=n)) for n in (True, False)]
    native, python = (tree if isinstance(tree, str) else _facts(tree) for tree in trees)
    assert native == python
    return native


def _trusted(content: bytes) -> Tree:
    return ObjectTree(pickle.loads(content), len(content))  # noqa: S301  (the test wrote it)


# What is read.


@_needs_native
@given(value=_VALUES, protocol=st.integers(0, 5))
def test_both_machines_read_what_pickle_reads(value: Any, protocol: int) -> None:
    content = pickle.dumps(value, protocol)
    assert _agreed(content) == _facts(_trusted(content))


@given(value=_VALUES, protocol=st.integers(0, 5))
def test_the_python_machine_reads_what_pickle_reads(value: Any, protocol: int) -> None:
    content = pickle.dumps(value, protocol)
    tree = pickled.read(content, native=False)
    assert _facts(tree) == _facts(_trusted(content))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("count", [999, 1000, 1001, 2500])
def test_lists_and_dictionaries_longer_than_a_batch_stay_whole(
    read: Callable[[bytes], Tree], count: int, protocol: int
) -> None:
    value = {"list": [[i] for i in range(count)], "dict": {str(i): i for i in range(count)}}
    tree = read(pickle.dumps(value, protocol))
    assert tree.plain(tree.root) == value


def test_lists_that_grow_in_turn_do_not_run_into_each_other(read: Callable[[bytes], Tree]) -> None:
    # Two lists under the memo numbers 0 and 1 get an item each, in turn.
    turns = b"".join(b"h\0K%ca0h\1K%ca0" % (i, 255 - i) for i in range(250))
    tree = read(b"\x80\2]q\0]q\1" + turns + b"h\0h\1\x86.")
    up, down = tree.plain(tree.root)
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
def test_integers_of_64_bits_are_read_and_the_upper_half_wraps(
    read: Callable[[bytes], Tree], number: int, read_as: int, protocol: int
) -> None:
    tree = read(pickle.dumps(number, protocol))
    numbers, known = tree.integers(_handles(tree.root))
    assert (numbers.tolist(), known.tolist()) == ([read_as], [True])


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, 1 << 9_999, 1.0, "1", None, b"1", [1]])
def test_what_is_no_integer_of_64_bits_is_0_and_unknown(
    read: Callable[[bytes], Tree], value: Any
) -> None:
    tree = read(pickle.dumps(value, 4))
    numbers, known = tree.integers(_handles(tree.root, 0))
    assert (numbers.tolist(), known.tolist()) == ([0, 0], [False, False])
    assert tree.plain(tree.root) == value


def test_needless_bytes_of_an_integer_change_nothing(read: Callable[[bytes], Tree]) -> None:
    tree = read(b"\x80\2(K\x07\x8a\x09\7\0\0\0\0\0\0\0\0\x8a\3\xff\xff\xff\x8a\1\xff\x8a\0K\0t.")
    assert tree.plain(tree.root) == [7, 7, -1, -1, 0, 0]
    assert tree.intern(tree.children(_handles(tree.root))[1])[0].tolist() == [0, 0, 1, 1, 2, 2]


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
def test_texts_that_cannot_be_encoded_are_spelled_out(
    read: Callable[[bytes], Tree], pickle_of_text: bytes, text: str
) -> None:
    tree = read(pickle_of_text)
    found = tree.plain(tree.root)
    assert found == text
    assert isinstance(found.encode(), bytes)


def test_a_key_that_comes_again_has_the_last_value_and_the_first_place(
    read: Callable[[bytes], Tree],
) -> None:
    tree = read(b"\x80\4}(\x8c\1aK\1\x8c\1bK\2\x8c\1aK\3u.")
    assert list(tree.plain(tree.root).items()) == [("a", 3), ("b", 2)]
    assert tree.plain(int(tree.column(_handles(tree.root), "a")[0])) == 3


def test_a_key_that_is_not_text_is_dropped_with_its_value(read: Callable[[bytes], Tree]) -> None:
    tree = read(b"\x80\4}(K\1K\1N]\x8c\1a}]\x8c\1b)NG" + bytes(8) + b"NC\1xNu.")
    assert tree.plain(tree.root) == {"a": {}}


def test_what_follows_the_end_of_the_pickle_is_not_looked_at(read: Callable[[bytes], Tree]) -> None:
    tree = read(pickle.dumps([1]) + b"cos\nsystem\n")
    assert tree.plain(tree.root) == [1]


def test_unused_values_and_marks_do_not_matter(read: Callable[[bytes], Tree]) -> None:
    tree = read(b"\x80\4N(K\1K\2" + b"1" + b"(0K\3K\4" + b"0.")
    assert tree.plain(tree.root) == 3


# Content.


def _event(name: str, *, shuffled: bool = False) -> dict[str, Any]:
    frame = {"name": name, "filename": "a.py", "line": 1}
    return {"frames": [dict(reversed(frame.items())) if shuffled else frame]}


def test_stacks_that_are_written_out_each_time_are_numbered_by_content(
    read: Callable[[bytes], Tree],
) -> None:
    events = [_event("f"), _event("g"), _event("f", shuffled=True), _event("g"), {}]
    # Without a memo nothing is shared.
    content = b"\x80\2(" + b"".join(pickle.dumps(e, 2)[2:-1] for e in events) + b"l."
    tree = read(content)
    frames = tree.column(tree.children(_handles(tree.root))[1], "frames")
    ids, first = tree.intern(frames)
    assert ids.tolist() == [0, 1, 0, 1, 2]
    assert first.tolist() == [frames[0], frames[1], 0]


def test_values_of_different_types_are_different_contents(read: Callable[[bytes], Tree]) -> None:
    groups = [
        [1], [True], [1.0], ["1"], [b"1"], [[1], (1,)], [None], [0], [False], [-0.0], [0.0],
        [math.nan, math.nan], [[], ()], [{}], [{"a": 1}], [{"a": True}], [[[1]], ((1,),)], [""],
    ]  # fmt: skip
    tree = read(pickle.dumps([value for group in groups for value in group], 4))
    ids, _ = tree.intern(tree.children(_handles(tree.root))[1])
    assert ids.tolist() == [number for number, group in enumerate(groups) for _ in group]


def test_content_is_compared_four_levels_deep_and_by_identity_below(
    read: Callable[[bytes], Tree],
) -> None:
    shared = [1]
    five = [[[[shared]]]]
    values = [[[[[1]]]], [[[[1]]]], five, [[[[shared]]]], [[[[[1]]]]], five[0]]
    # The last is met inside the third, at another depth: before or after must not matter.
    for order, expected in ((values, [0, 0, 1, 1, 2, 0]), (values[::-1], [0, 1, 2, 2, 0, 0])):
        tree = read(pickle.dumps(order, 4))
        ids, _ = tree.intern(tree.children(_handles(tree.root))[1])
        assert ids.tolist() == expected


# What is refused.


_REFUSED = {
    "GLOBAL": b"cos\nsystem\n", "STACK_GLOBAL": b"\x8c\2os\x8c\6system\x93", "REDUCE": b"N)R",
    "BUILD": b"N}b", "INST": b"(ios\nsystem\n", "OBJ": b"(No", "NEWOBJ": b"N)\x81",
    "NEWOBJ_EX": b"N)}\x92", "EXT1": b"\x82\1", "EXT2": b"\x83\1\0", "EXT4": b"\x84\1\0\0\0",
    "PERSID": b"Pid\n", "BINPERSID": b"NQ", "EMPTY_SET": b"\x8f", "ADDITEMS": b"(\x90",
    "FROZENSET": b"(\x91", "BYTEARRAY8": b"\x96" + bytes(8), "NEXT_BUFFER": b"\x97",
    "READONLY_BUFFER": b"\x98",
}  # fmt: skip


@pytest.mark.parametrize("name", _REFUSED)
def test_an_opcode_that_is_not_plain_data_is_refused_by_name(
    read: Callable[[bytes], Tree], name: str
) -> None:
    with pytest.raises(SnapshotError, match=f"^byte [0-9]+: opcode {name} .*nothing was loaded$"):
        read(b"\x80\4" + _REFUSED[name] + b".")


def test_the_refusal_says_where_and_what_to_do(read: Callable[[bytes], Tree]) -> None:
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
def test_an_object_hidden_in_plain_data_is_never_made(
    read: Callable[[bytes], Tree], protocol: int
) -> None:
    with pytest.raises(SnapshotError, match="nothing was loaded"):
        read(pickle.dumps({"segments": [1, {"a": _Evil()}]}, protocol))


@_needs_native
@pytest.mark.parametrize("opcode", range(256))
def test_both_machines_know_the_same_opcodes(opcode: int) -> None:
    for before in (b"", b"\x80\4N", b"\x80\4N(]}NN"):
        for after in (b".", b"\0\0\0\0\0\0\0\0\0\0N.", b"1\n."):
            _agreed(before + bytes([opcode]) + after)


_DAMAGED = {
    b"\x80\2e.": "opcode APPENDS needs a MARK",
    b"\x80\2(e.": "opcode APPENDS needs values",
    b"\x80\2](a.": "opcode APPEND needs values",
    b"\x80\2N(K": "ends in the middle",
    b"\x80\2N(e.": "opcode APPENDS adds to a value of another kind",
    b"\x80\2NNa.": "opcode APPEND adds to a value of another kind",
    b"\x80\2](NNu.": "opcode SETITEMS adds to a value of another kind",
    b"\x80\2}(Nu.": "opcode SETITEMS has a key without a value",
    b"\x80\2(Nd.": "opcode DICT has a key without a value",
    b"\x80\2N\x86.": "opcode TUPLE2 needs values",
    b"\x80\2.": "opcode STOP needs values",
    b"\x80\2N(.": "opcode STOP needs values",
    b"\x80\2N(N\x86.": "opcode TUPLE2 needs values",
    b"\x80\2" + b"0.": "opcode POP needs values",
    b"\x80\2" + b"1.": "opcode POP_MARK needs a MARK",
    b"\x80\2" + b"2.": "opcode DUP needs values",
    b"\x80\2q\0.": "opcode BINPUT needs values",
    b"\x80\2\x94.": "opcode MEMOIZE needs values",
    b"\x80\2h\0.": "opcode BINGET asks for a value that was not stored",
    b"\x80\2]q\3h\2.": "opcode BINGET asks for a value that was not stored",
    b"\x80\2]r\0\xc2\xeb\x0b.": "opcode LONG_BINPUT stores under a number greater than its place",
    b"Np200000000\n.": "opcode PUT stores under a number greater",
    b"Np" + b"9" * 40 + b"\n.": "opcode PUT stores under a number greater",
    b"Np-1\n.": "opcode PUT has an argument that makes no sense",
    b"g" + b"9" * 40 + b"\n.": "opcode GET asks for a value",
    b"I1_0\n.": "opcode INT has an argument that makes no sense",
    b"I0x1\n.": "opcode INT has an argument that makes no sense",
    b"I\n.": "opcode INT has an argument that makes no sense",
    b"L-L\n.": "opcode LONG has an argument that makes no sense",
    b"L" + b"9" * 5000 + b"L\n.": "opcode LONG has an argument that makes no sense",
    b"Fx\n.": "opcode FLOAT has an argument that makes no sense",
    b"Sx\n.": "opcode STRING has an argument that makes no sense",
    b"S'\n.": "opcode STRING has an argument that makes no sense",
    b"\x80\6N.": "opcode PROTO names a protocol above 5",
    b"hello": "or no pickle at all",
    b"\xff\xfe": "byte 0: 0xff is no opcode",
    b"": "ends in the middle, after 0 bytes",
    b"\x80\2N": "ends in the middle, after 3 bytes",
    b"I1": "ends in the middle",
}


@pytest.mark.parametrize(("content", "reason"), _DAMAGED.items())
def test_a_damaged_file_is_refused_with_its_reason(
    read: Callable[[bytes], Tree], content: bytes, reason: str
) -> None:
    with pytest.raises(SnapshotError) as refusal:
        read(content)
    assert reason in refusal.value.message
    assert refusal.value.hint


_LENGTHS = {
    b"X": 4, b"\x8d": 8, b"T": 4, b"U": 1, b"\x8c": 1, b"B": 4, b"C": 1, b"\x8e": 8,
    b"\x8a": 1, b"\x8b": 4, b"\x95": 8,
}  # fmt: skip


@pytest.mark.parametrize("opcode", _LENGTHS)
def test_a_declared_length_is_not_believed(read: Callable[[bytes], Tree], opcode: bytes) -> None:
    for length in (b"\xff" * _LENGTHS[opcode], b"\xff" * (_LENGTHS[opcode] - 1) + b"\x7f"):
        with pytest.raises(SnapshotError, match="ends in the middle"):
            read(b"\x80\4" + opcode + length + b"abcdefgh.")


_SNAPSHOT = {
    "segments": [{"address": 1 << 47, "blocks": [{"size": 512, "state": "active_allocated"}]}],
    "device_traces": [[_event("f"), _event("é"), {"addr": (1 << 64) - 1, "time_us": 1.5}], []],
    "allocator_settings": {"expandable_segments": True, "roundup": {"1": 2}, "none": None},
}


@pytest.mark.parametrize("protocol", range(6))
def test_a_file_cut_at_any_byte_is_refused_by_both_alike(
    read: Callable[[bytes], Tree], protocol: int
) -> None:
    content = pickle.dumps(_SNAPSHOT, protocol)
    for size in range(len(content)):
        with pytest.raises(SnapshotError, match=f"ends in the middle, after {size} bytes"):
            read(content[:size])


# Mutations, and programs made of opcodes.


@_needs_native
@given(
    protocol=st.integers(0, 5),
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=6),
)
def test_both_machines_agree_on_mutated_files(
    protocol: int, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(pickle.dumps(_SNAPSHOT, protocol))
    for place, byte in changes:
        content[place % len(content)] = byte
    _agreed(bytes(content))


_WORDS = [
    *(b"%c" % opcode for opcode in b"(]})NldtaesuN012\x85\x86\x87\x88\x89\x94"),
    b"K\1", b"K\2", b"M\1\1", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\0",
    b"\x8a\x09" + b"\xff" * 8 + b"\1", b"G" + struct.pack(">d", 1.0), b"\x8c\1a", b"U\1b",
    b"X\4\0\0\0name", b"\x8c\2\xc3\xa9", b"\x8c\1\xff", b"C\1a", b"B\0\0\0\0", b"I01\n", b"I7\n",
    b"L7L\n", b"L" + b"9" * 30 + b"\n", b"F1.0\n", b"Va\n", b"S'a'\n",
    b"q\0", b"q\1", b"q\2", b"h\0", b"h\1", b"h\2", b"h\2h\2h\2", b"p3\n", b"g3\n",
    b"r\4\0\0\0", b"j\4\0\0\0", b"(h\0h\0h\0l", b"(h\1h\1e", b"(\x8c\1aNu", b"\x8c\1aKas",
]  # fmt: skip


@_needs_native
@settings(deadline=None)
@given(words=st.lists(st.sampled_from(_WORDS), max_size=60))
@example(words=[b"]", b"q\0", b"h\0", b"a"])
@example(words=[b"]", b"q\0", *[b"h\0h\0\x86q\0"] * 40])
def test_both_machines_agree_on_arbitrary_programs(words: list[bytes]) -> None:
    _agreed(b"\x80\4]}N" + b"".join(words) + b".")


# Bombs.


def test_a_list_that_contains_itself_hangs_nothing(read: Callable[[bytes], Tree]) -> None:
    loop: list[Any] = []
    loop += [loop, {"a": loop}, 1]
    tree = read(pickle.dumps(loop, 4))
    with pytest.raises(SnapshotError, match="shared to multiply"):
        tree.plain(tree.root)
    counts, children = tree.children(_handles(tree.root))
    assert counts.tolist() == [3]
    assert tree.intern(children)[0].tolist() == [0, 1, 2]


def test_lists_shared_to_multiply_are_refused_before_they_are_walked(
    read: Callable[[bytes], Tree],
) -> None:
    layers: list[Any] = ["x"] * 100
    for _ in range(12):
        layers = [layers] * 100
    tree = read(pickle.dumps(layers, 4))
    with pytest.raises(SnapshotError, match="shared to multiply"):
        tree.plain(tree.root)
    children = tree.children(_handles(tree.root))[1]
    with pytest.raises(SnapshotError, match="shared to multiply"):
        tree.children(np.repeat(children, 100))
    assert tree.intern(children)[0].tolist() == [0] * 100


def test_nesting_a_million_deep_is_read_and_not_descended(read: Callable[[bytes], Tree]) -> None:
    tree = read(b"\x80\4N" + b"\x85" * 1_000_000 + b".")
    with pytest.raises(SnapshotError, match="deeper than 100 levels"):
        tree.plain(tree.root)
    assert tree.intern(_handles(tree.root))[0].tolist() == [0]


def test_a_subtree_of_100_levels_is_the_deepest_that_is_built(
    read: Callable[[bytes], Tree],
) -> None:
    deepest = read(b"\x80\4N" + b"\x85" * 99 + b".")
    value = deepest.plain(deepest.root)
    for _ in range(99):
        (value,) = value
    assert value is None
    deeper = read(b"\x80\4N" + b"\x85" * 100 + b".")
    with pytest.raises(SnapshotError, match="deeper than 100 levels"):
        deeper.plain(deeper.root)


@pytest.mark.parametrize("key", [b"N" + b"\x85" * 1_000_000, b")" + b"2\x86" * 100, b"]2a", b"}"])
def test_a_container_as_a_key_is_never_hashed(read: Callable[[bytes], Tree], key: bytes) -> None:
    tree = read(b"\x80\4}" + key + b"Ns\x8c\1aK\1s.")
    assert tree.plain(tree.root) == {"a": 1}


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
@_needs_native
def test_memory_stays_in_proportion_to_the_file(bomb: bytes) -> None:
    pickled.read(b"N.", native=True)
    tracemalloc.start()
    try:
        _outcome(pickled.read, bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The first chunk of items is a mebibyte.
    assert peak < (2 << 20) + 80 * len(bomb)


# The face of the trees.


def test_a_node_of_another_kind_is_named_in_the_error(read: Callable[[bytes], Tree]) -> None:
    tree = read(pickle.dumps([[], {}, "a", 1, True, None, 1.0, b"a"], 4))
    items = tree.children(_handles(tree.root))[1]
    kinds = ["a list", "a dictionary", "text", "int", "bool", "NoneType", "float", "bytes"]
    for item, kind in zip(items.tolist(), kinds, strict=True):
        assert tree.is_list(item) == (kind == "a list")
        if kind != "a list":
            with pytest.raises(SnapshotError, match=f"has {kind} where .* has a list"):
                tree.children(_handles(0, item))
        if kind != "a dictionary":
            with pytest.raises(SnapshotError, match=f"has {kind} where .* has a dictionary"):
                tree.column(_handles(item), "a")
            with pytest.raises(SnapshotError, match=f"has {kind} where .* has a dictionary"):
                tree.members(item)


def test_the_absent_node_has_no_items_and_is_no_dictionary(read: Callable[[bytes], Tree]) -> None:
    tree = read(b"].")
    counts, children = tree.children(_handles(0, tree.root, 0))
    assert (counts.tolist(), children.tolist()) == ([0, 0, 0], [])
    assert not tree.is_list(0)
    assert tree.plain(0) is None
    with pytest.raises(SnapshotError, match="NoneType"):
        tree.column(_handles(0), "a")


def test_no_handles_give_no_answers(read: Callable[[bytes], Tree]) -> None:
    tree = read(b"].")
    none = _handles()
    assert [len(part) for part in tree.children(none)] == [0, 0]
    assert [len(part) for part in tree.integers(none)] == [0, 0]
    assert [len(part) for part in tree.intern(none)] == [0, 0]
    assert len(tree.column(none, "a")) == 0


def test_arrays_that_are_slices_with_a_step_are_read_as_any(read: Callable[[bytes], Tree]) -> None:
    tree = read(pickle.dumps(list(range(10))))
    children = tree.children(_handles(tree.root))[1]
    assert tree.integers(children[::3])[0].tolist() == [0, 3, 6, 9]
    assert tree.integers(children[::-1])[0].tolist() == list(range(9, -1, -1))


@_needs_native
@pytest.mark.parametrize("handle", [1, *((tag << 60) + 3 for tag in range(16) if tag != 2)])
def test_a_number_that_is_no_handle_is_not_followed(handle: int) -> None:
    tree = pickled.read(b"\x80\4]}\x8c\1aNs\x86.", native=True)
    for answer in (tree.plain, tree.is_list, tree.members):
        with pytest.raises(IndexError):
            answer(handle)
    for many in (tree.children, tree.integers, tree.intern, lambda h: tree.column(h, "a")):
        with pytest.raises(IndexError):
            many(_handles(handle))


@_needs_native
def test_the_native_machine_serves_where_it_was_built() -> None:
    assert not isinstance(pickled.read(b"N."), ObjectTree)
    assert isinstance(pickled.read(b"N.", native=False), ObjectTree)
