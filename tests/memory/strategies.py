"""Hypothesis strategies: programs for the simulated allocator, and arbitrary traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from memory import builders
from memory.builders import KIB, MIB, POOLS, STACKS, STREAMS, Block, Entry, Segment
from memory.simulated_history import SimulatedHistory
from memory.simulator import BASE, Allocator

from cudakit.memory.snapshot import Action, BlockState, DeviceTrace, SegmentKind

# For property tests: enough programs, and no time limit per program.
LAW = settings(max_examples=40, deadline=None)

# Sizes on both sides of each limit: rounding, small and large pools, own segments, splitting.
SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(MIB - KIB, MIB + KIB),
    st.integers(MIB, 4 * MIB),
    st.integers(MIB, 10 * MIB),
    st.integers(9 * MIB, 45 * MIB),
    st.sampled_from((2 * MIB, 5 * MIB, 10 * MIB, 19 * MIB + 512 * KIB, 20 * MIB, 21 * MIB)),
)

# The calls of a program, weighted by repetition.
_VERBS = (
    *["alloc"] * 5,
    *["alloc_a_bit_less"] * 2,
    *["free"] * 5,
    "free_all",
    *["record_stream"] * 2,
    "synchronize",
    "empty_cache",
    "mark",
)


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the allocator; each call uses some of the fields."""

    verb: str
    size: int
    stream: int
    pool: int
    stack: int
    which: int  # index of a live allocation, modulo their number

    def run(self, allocator: Allocator) -> None:
        live = allocator.live() or [None]
        address = live[self.which % len(live)]
        match self.verb:
            case "alloc":
                allocator.alloc(self.size, stream=self.stream, pool=self.pool, stack=self.stack)
            case "alloc_a_bit_less" if allocator.lifetimes:
                # Reuses a free block with a remainder that is too small to be split off.
                like = allocator.lifetimes[self.which % len(allocator.lifetimes)]
                size = max(like.size - self.size % MIB, 1)
                allocator.alloc(size, stream=like.stream, pool=like.pool, stack=self.stack)
            case "free_all":
                for each in allocator.live():
                    allocator.free(each)
            case "free" if address is not None:
                allocator.free(address)
            case "record_stream" if address is not None:
                allocator.record_stream(address, self.stream)
            case "synchronize":
                allocator.synchronize(self.stream)
            case "empty_cache":
                allocator.empty_cache()
            case "mark":
                allocator.capturing = not allocator.capturing
                allocator.mark()


def _programs(streams: int, pools: int) -> st.SearchStrategy[list[Step]]:
    step = st.builds(
        Step,
        verb=st.sampled_from(_VERBS),
        size=SIZES,
        stream=st.integers(0, streams - 1),
        pool=st.integers(0, pools - 1),
        stack=st.integers(0, len(STACKS) - 1),
        which=st.integers(0, 99),
    )
    # A drawn length, because hypothesis prefers lists of a few items.
    return st.integers(0, 36).flatmap(lambda n: st.lists(step, min_size=n, max_size=n))


@st.composite
def histories(
    draw: Callable[[st.SearchStrategy[Any]], Any],
    *,
    streams: int = 4,
    pools: int = 1,
    records_pools: bool = True,
) -> SimulatedHistory:
    """Run a program on an allocator with any settings."""
    allocator = Allocator(
        capacity=draw(st.sampled_from((64 * MIB, 160 * MIB, 1024 * MIB))),
        limit=draw(st.sampled_from((None, None, 96 * MIB))),
        expandable=draw(st.booleans()),
        max_split=draw(st.sampled_from((None, None, 21 * MIB, 32 * MIB))),
        custom_pools=frozenset(draw(st.sets(st.integers(1, 3), max_size=1))),
        records_pools=records_pools,
    )
    streams, pools = draw(st.sampled_from((1, 2, streams))), draw(st.sampled_from((1, pools)))
    for step in draw(_programs(streams, pools)):
        step.run(allocator)
    return allocator.history()


@st.composite
def recordings(
    draw: Callable[[st.SearchStrategy[Any]], Any], *, pools: int = 1, records_pools: bool = True
) -> SimulatedHistory:
    """Keep the last entries of a history, with frees as one or as two entries."""
    history = draw(histories(pools=pools, records_pools=records_pools))
    if draw(st.booleans()):
        history = history.with_merged_frees()
    return history.last(draw(st.integers(0, len(history.entries))))


# Few addresses and sizes, so that entries collide, and the limits of the integer types.
_ADDRESSES = st.one_of(
    st.integers(0, 12).map(lambda i: BASE + i * 512),
    st.integers(0, 12).map(lambda i: BASE + i * 2 * MIB),
)
_EXTREME_ADDRESSES = (0, 1, 1 << 52, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_BYTES = st.one_of(
    st.sampled_from((0, 1, 512, 1024, MIB, 2 * MIB, 20 * MIB, 1 << 49)), st.integers(0, 4 * MIB)
)


@st.composite
def garbage(
    draw: Callable[[st.SearchStrategy[Any]], Any], *, max_address: int = (1 << 64) - 1
) -> DeviceTrace:
    """Return a trace whose entries and final state are arbitrary."""
    extremes = [address for address in _EXTREME_ADDRESSES if address <= max_address]
    addresses = _ADDRESSES | st.sampled_from(extremes)
    stream, stack = st.integers(0, len(STREAMS) - 1), st.integers(0, len(STACKS) - 1)
    pool = st.integers(0, len(POOLS) - 1)
    time = st.sampled_from((None, 0, 1, -5, 1 << 60))
    entry = st.builds(
        Entry,
        action=st.sampled_from(Action),
        address=addresses,
        size=_BYTES,
        stream=stream,
        time_us=time,
        stack=stack,
        pool=st.one_of(st.just(-1), pool),
    )
    block = st.builds(
        Block,
        address=addresses,
        size=_BYTES,
        requested=st.one_of(st.none(), _BYTES),
        state=st.sampled_from(BlockState),
        stack=stack,
    )
    segment = st.builds(
        Segment,
        address=addresses,
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
