"""Types for mypy: the native types have the attributes of the plain Python types."""

from collections.abc import Callable
from typing import Self

from cudakit.allocator import blocks, fast_path, guard, history, pool_stats
from cudakit.torch_rules.oom_facts import PoolId

class Gate(guard.Gate): ...
class BlockCounters(pool_stats.BlockCounters): ...
class Block(blocks.Block): ...

class FreeBlocks(blocks.FreeBlocks):
    def __new__(
        cls,
        pool: blocks.BlockPool,
        pool_id: PoolId,
        stream: int,
        counters: pool_stats.BlockCounters,
    ) -> Self: ...

class Events(history.Events): ...

class FastPath:
    def __new__(
        cls,
        gate: guard.Gate,
        live_blocks: dict[int, blocks.Block],
        small_by_stream: dict[int, blocks.FreeBlocks],
        large_by_stream: dict[int, blocks.FreeBlocks],
        small: pool_stats.BlockCounters,
        large: pool_stats.BlockCounters,
        total: pool_stats.BlockCounters,
        block_type: type[Block],
        slow_alloc: fast_path.Alloc,
        slow_free: fast_path.Free,
    ) -> Self: ...
    alloc: fast_path.Alloc
    free: fast_path.Free
    def set_history(
        self,
        events: history.Events | None,
        level: int,
        gather: Callable[[], blocks.RawStack],
    ) -> object: ...
