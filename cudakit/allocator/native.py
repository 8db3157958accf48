"""The native types of the allocator. Their data and frequent methods are in C (fast/), the others in Python.

Importing this module raises ImportError if the extension was not compiled. The plain types are used then.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from cudakit.allocator import _fast, blocks, pool_stats
from cudakit.allocator.blocks import BlockPool, BlockTypes, PagedRange
from cudakit.allocator.engine import Engine
from cudakit.allocator.history import Level, gather_stack
from cudakit.allocator.pool_stats import PoolStats

if TYPE_CHECKING:
    from cudakit.allocator.fast_path import SlowCalls
    from cudakit.allocator.history import History


class Block(_fast.Block):
    """A block whose attributes are stored in C; see blocks.Block."""

    __slots__ = ()

    stream = blocks.Block.stream
    pool = blocks.Block.pool
    is_split = blocks.Block.is_split


class FreeBlocks(_fast.FreeBlocks):
    """Free blocks, sorted in C; see blocks.FreeBlocks."""

    __slots__ = ("stats",)

    stats: PoolStats

    def __new__(cls, pool: BlockPool, stream: int) -> FreeBlocks:
        self = super().__new__(cls, pool, pool.id, stream, pool.stats.block_counters)
        self.stats = pool.stats
        return self

    def __iter__(self) -> Iterator[blocks.Block]:
        return iter(self.blocks_from_size(0))

    def new_block(self, ptr: int, size: int, expandable_segment: PagedRange | None = None) -> Block:
        """Return a new block of this pool and stream, which is not free."""
        return Block(ptr, size, self, expandable_segment)


class BlockCounters(_fast.BlockCounters):
    """Counters whose values are stored in C; see pool_stats.BlockCounters."""

    __slots__ = ("all_pools", "other_pools")

    count_alloc = pool_stats.BlockCounters.count_alloc
    count_free = pool_stats.BlockCounters.count_free
    count_split = pool_stats.BlockCounters.count_split


Events = _fast.Events
Gate = _fast.Gate
NATIVE_TYPES = BlockTypes(FreeBlocks, BlockCounters)


class FastPath(_fast.FastPath):
    """``alloc`` and ``free`` in C; see fast_path.FastPath."""

    __slots__ = ("_engine",)

    python_frames = 0
    _engine: Engine

    def __new__(
        cls,
        engine: Engine,
        gate: Gate,
        live_blocks: dict[int, blocks.Block],
        slow_calls: SlowCalls,
    ) -> FastPath:
        pools, stats = engine.default_pools, engine.stats
        self = super().__new__(
            cls,
            gate,
            live_blocks,
            pools.small.by_stream,
            pools.large.by_stream,
            stats.small.block_counters,
            stats.large.block_counters,
            stats.peaks.block_counters,
            Block,
            slow_calls.slow_alloc,
            slow_calls.slow_free,
        )
        self._engine = engine
        return self

    def record_events(self, history: History | None) -> bool:
        """Set the history of events, or None; return whether the fast path records all events."""
        self._engine.history = history
        level = history.level if history else Level.NONE
        self.set_history(history.events if history else None, level, partial(gather_stack, 0))
        return history is None or not history.skipped_actions
