"""Programs for the simulated allocator, and traces that no allocator wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from core.memory import builders
from core.memory.builders import KIB, MIB, POOLS, STACKS, STREAMS, Block, Entry, Segment
from core.memory.history import History
from core.memory.simulator import BASE, Allocator
from hypothesis import strategies as st

from cudakit.core.memory.snapshot import Action, BlockState, DeviceTrace, SegmentKind

# Sizes at both sides of every rule: rounding, the two pools, segments of one's own, splitting.
SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(MIB - KIB, MIB + KIB),
    st.integers(MIB, 10 * MIB),
    st.integers(9 * MIB, 45 * MIB),
    st.sampled_from((2 * MIB, 5 * MIB, 10 * MIB, 19 * MIB + 512 * KIB, 20 * MIB, 21 * MIB)),
)

_Program: TypeAlias = list[tuple[Any, ...]]


def _steps(streams: int, pools: int) -> st.SearchStrategy[_Program]:
    stream, pool, which = st.integers(0, streams - 1), st.integers(0, pools - 1), st.integers(0, 99)
    stack = st.integers(0, len(STACKS) - 1)
    alloc = st.tuples(st.just("alloc"), SIZES, stream, pool, stack)
    free = st.tuples(st.just("free"), which)
    others = [
        st.tuples(st.just("record_stream"), which, stream),
        st.tuples(st.just("synchronize"), stream),
        st.tuples(st.just("empty_cache")),
        st.tuples(st.just("capture")),
        st.tuples(st.just("mark")),
    ]
    return st.lists(st.one_of(alloc, alloc, alloc, free, free, *others), max_size=36)


@st.composite
def histories(
    draw: Callable[[st.SearchStrategy[Any]], Any],
    *,
    streams: int = 4,
    pools: int = 1,
    says_pools: bool = True,
) -> History:
    """Run a program on an allocator of any kind."""
    allocator = Allocator(
        capacity=draw(st.sampled_from((64 * MIB, 160 * MIB, 1024 * MIB))),
        limit=draw(st.sampled_from((None, None, 96 * MIB))),
        expandable=draw(st.booleans()),
        max_split=draw(st.sampled_from((None, None, 21 * MIB, 32 * MIB))),
        custom_pools=frozenset(draw(st.sets(st.integers(1, 3), max_size=1))),
        says_pools=says_pools,
    )
    for step in draw(_steps(draw(st.integers(1, streams)), pools)):
        _do(allocator, *step)
    return allocator.history()


def _do(allocator: Allocator, verb: str, *arguments: int) -> None:
    match verb, arguments:
        case "alloc", (size, stream, pool, stack):
            allocator.alloc(size, stream=stream, pool=pool, stack=stack)
        case "free" | "record_stream", (which, *rest):
            if live := allocator.live():
                getattr(allocator, verb)(live[which % len(live)], *rest)
        case "capture", ():
            allocator.capturing = not allocator.capturing
        case _:
            getattr(allocator, verb)(*arguments)


def cuts(history: History) -> st.SearchStrategy[History]:
    """Keep only the last entries, however few."""
    return st.integers(0, len(history.entries)).map(history.last)


# Few addresses and sizes, so that entries meet; and the ends of what the types hold.
_ADDRESSES = st.one_of(
    st.integers(0, 12).map(lambda i: BASE + i * 512),
    st.integers(0, 12).map(lambda i: BASE + i * 2 * MIB),
    st.sampled_from((0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)),
)
_BYTES = st.one_of(
    st.sampled_from((0, 1, 512, 1024, MIB, 2 * MIB, 20 * MIB, 1 << 49)), st.integers(0, 4 * MIB)
)


@st.composite
def garbage(draw: Callable[[st.SearchStrategy[Any]], Any]) -> DeviceTrace:
    """Make a trace of entries and a final state that need have nothing to do with each other."""
    stream, stack = st.integers(0, len(STREAMS) - 1), st.integers(0, len(STACKS) - 1)
    pool = st.integers(0, len(POOLS) - 1)
    time = st.sampled_from((None, 0, 1, -5, 1 << 60))
    entry = st.builds(
        Entry,
        action=st.sampled_from(Action),
        address=_ADDRESSES,
        size=_BYTES,
        stream=stream,
        time_us=time,
        stack=stack,
        pool=st.one_of(st.just(-1), pool),
    )
    block = st.builds(
        Block,
        address=_ADDRESSES,
        size=_BYTES,
        requested=st.one_of(st.none(), _BYTES),
        state=st.sampled_from(BlockState),
        stack=stack,
    )
    segment = st.builds(
        Segment,
        address=_ADDRESSES,
        size=_BYTES,
        blocks=st.lists(block, max_size=4),
        stream=stream,
        kind=st.sampled_from(SegmentKind),
        pool=pool,
        expandable=st.booleans(),
        stack=stack,
    )
    entries = draw(st.lists(entry, max_size=24))
    return builders.trace(entries, draw(st.lists(segment, max_size=5)))
