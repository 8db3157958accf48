"""Programs for the simulated allocator, and traces that no allocator wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.memory import builders
from core.memory.builders import KIB, MIB, POOLS, STACKS, STREAMS, Block, Entry, Segment
from core.memory.history import History
from core.memory.simulator import BASE, Allocator
from hypothesis import settings
from hypothesis import strategies as st

from cudakit.core.memory.snapshot import BlockState, DeviceTrace, SegmentKind
from cudakit.torch_rules.actions import Action

# For laws: enough programs, and no limit on the time of one.
LAW = settings(max_examples=40, deadline=None)

# Sizes at both sides of every rule: rounding, the two pools, segments of one's own, splitting.
SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(MIB - KIB, MIB + KIB),
    st.integers(MIB, 4 * MIB),
    st.integers(MIB, 10 * MIB),
    st.integers(9 * MIB, 45 * MIB),
    st.sampled_from((2 * MIB, 5 * MIB, 10 * MIB, 19 * MIB + 512 * KIB, 20 * MIB, 21 * MIB)),
)

# What a program does, as often as it is named here.
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
    """One call on the allocator; a verb takes what it needs."""

    verb: str
    size: int
    stream: int
    pool: int
    stack: int
    which: int  # of what is allocated, counted around

    def run(self, allocator: Allocator) -> None:
        live = allocator.live() or [None]
        address = live[self.which % len(live)]
        match self.verb:
            case "alloc":
                allocator.alloc(self.size, stream=self.stream, pool=self.pool, stack=self.stack)
            case "alloc_a_bit_less" if allocator.lives:
                # So that a free block is taken of which too little remains to be split off.
                like = allocator.lives[self.which % len(allocator.lives)]
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
    # A list of a drawn length: left to itself it would be a few steps long.
    return st.integers(0, 36).flatmap(lambda n: st.lists(step, min_size=n, max_size=n))


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
    streams, pools = draw(st.sampled_from((1, 2, streams))), draw(st.sampled_from((1, pools)))
    for step in draw(_programs(streams, pools)):
        step.run(allocator)
    return allocator.history()


@st.composite
def recordings(
    draw: Callable[[st.SearchStrategy[Any]], Any], *, pools: int = 1, says_pools: bool = True
) -> History:
    """Keep of a history only the last entries, however few; frees in one entry or in two."""
    history = draw(histories(pools=pools, says_pools=says_pools))
    if draw(st.booleans()):
        history = history.with_merged_frees()
    return history.last(draw(st.integers(0, len(history.entries))))


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
