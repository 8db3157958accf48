"""Types for mypy: native types have the attributes of the plain ones."""

from collections.abc import Callable
from typing import Self

from cudakit.core.allocator import blocks, fast_path, history, pool_stats
from cudakit.core.allocator.blocks import Block as PlainBlock
from cudakit.core.allocator.guard import Guard

class BlockCounters(pool_stats.BlockCounters): ...
class Block(blocks.Block): ...

class FreeBlocks(blocks.FreeBlocks):
    def __new__(
        cls, pool: blocks.BlockPool, stream: int, counters: pool_stats.BlockCounters
    ) -> Self: ...

class Events(history.Events): ...

class FastPath:
    slow: bool
    def __new__(
        cls,
        guard: Guard[object],
        live: dict[int, PlainBlock],
        small_by_stream: dict[int, blocks.FreeBlocks],
        large_by_stream: dict[int, blocks.FreeBlocks],
        small: pool_stats.BlockCounters,
        large: pool_stats.BlockCounters,
        total: pool_stats.BlockCounters,
        slow_calls: fast_path.SlowCalls,
        block_type: type[Block],
    ) -> Self: ...
    alloc: fast_path.Alloc
    free: fast_path.Free
    def set_history(
        self, history: history.History | None, gather: Callable[[], blocks.RawStack]
    ) -> object: ...
