"""Compare the trees of both machines by all their queries."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from cudakit.errors import SnapshotError
from cudakit.memory.load import pickled
from cudakit.memory.load.tree import Budget, Handles, ObjectTree, Tree

HAS_NATIVE = find_spec("cudakit.memory.load._pickled") is not None
NEEDS_NATIVE = pytest.mark.skipif(not HAS_NATIVE, reason="the native machine was not built")
MACHINES = [pytest.param(True, marks=NEEDS_NATIVE, id="native"), pytest.param(False, id="python")]

Read = Callable[[bytes], Tree]


def reader(*, native: bool) -> Read:
    return lambda content: pickled.read(content, native=native)


def event(name: str, *, shuffled: bool = False) -> dict[str, Any]:
    frame = {"name": name, "filename": "a.py", "line": 1}
    return {"frames": [dict(reversed(frame.items())) if shuffled else frame]}


SNAPSHOT = {
    "segments": [{"address": 1 << 47, "blocks": [{"size": 512, "state": "active_allocated"}]}],
    "device_traces": [[event("f"), event("é"), {"addr": (1 << 64) - 1, "time_us": 1.5}], []],
    "allocator_settings": {"expandable_segments": True, "roundup": {"1": 2}, "none": None},
}


def handles(*handles: int) -> Handles:
    return np.array(handles, np.uint64)


def outcome(answer: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return answer(*arguments)
    except SnapshotError as error:
        return error.message


def listed(value: Any) -> Any:
    """Return a comparable form of a value that distinguishes 1, 1.0, True, NaN and -0.0."""
    if isinstance(value, (list, tuple)):
        return [listed(item) for item in value]
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    return repr(value)


def facts(tree: Tree, max_count: int = 200) -> list[Any]:
    """Return the results of all queries on all nodes, in breadth-first order."""
    nodes, found = [tree.root], []
    for node in nodes:
        members = outcome(tree.members, node)
        children = outcome(tree.children, handles(node))
        found.append((tree.is_list(node), listed(outcome(tree.plain_object, node))))
        found.append(list(members) if isinstance(members, dict) else members)
        found.append(children[0].tolist() if isinstance(children, tuple) else children)
        if len(nodes) < max_count:
            nodes += members.values() if isinstance(members, dict) else []
            nodes += children[1].tolist() if isinstance(children, tuple) else []
    return [*found, *_facts_of_many(tree, nodes)]


def _facts_of_many(tree: Tree, nodes: list[int]) -> list[Any]:
    dicts = [n for n in nodes if isinstance(outcome(tree.members, n), dict)]
    lists = [0, *(n for n in nodes if tree.is_list(n))]
    ids, first = tree.intern(handles(0, *nodes))
    numbers, known = tree.integers(handles(0, *nodes))
    counts = outcome(tree.children, handles(*lists))
    columns = [
        [bool(found), found and listed(outcome(tree.plain_object, found))]
        for key in ("", "name", "a", "\ud800")
        for found in tree.column(handles(*dicts), key).tolist()
    ]
    return [
        ids.tolist(),
        [[0, *nodes].index(node) for node in first.tolist()],
        numbers.tolist(),
        known.tolist(),
        counts[0].tolist() if isinstance(counts, tuple) else counts,
        outcome(tree.column, handles(*nodes), "a") if len(dicts) < len(nodes) else None,
        columns,
    ]


def agreed(content: bytes) -> Any:
    """Read with both machines, and require the same result."""
    trees = [outcome(lambda n=n: pickled.read(content, native=n)) for n in (True, False)]
    native, python = (tree if isinstance(tree, str) else facts(tree) for tree in trees)
    assert native == python
    return native


def trusted(content: bytes) -> Tree:
    return ObjectTree(pickle.loads(content), Budget(len(content), len(content)))  # noqa: S301  (the test wrote it)
