"""Types for mypy: the native types have the attributes of the plain Python types."""

from collections.abc import Callable
from typing import Self

from cudakit.allocator import blocks, guard, history, stats
from cudakit.gpu.api import Ptr

class Gate(guard.Gate): ...
class BlockCounters(stats.BlockCounters): ...
class Block(blocks.Block): ...
class FreeBlocks(blocks.FreeBlocks): ...
class Events(history.Events): ...

class FastPath:
    def __new__(
        cls,
        gate: guard.Gate,
        live_blocks: dict[int, blocks.Block],
        small_by_stream: dict[int, blocks.FreeBlocks],
        large_by_stream: dict[int, blocks.FreeBlocks],
        small: stats.BlockCounters,
        large: stats.BlockCounters,
        total: stats.BlockCounters,
        slow_alloc: Callable[..., Ptr],
        slow_free: Callable[..., None],
    ) -> Self: ...
    alloc: Callable[..., Ptr]
    free: Callable[..., None]
    def set_history(
        self,
        events: history.Events | None,
        level: int,
        gather: Callable[[], blocks.RawStack],
    ) -> object: ...
