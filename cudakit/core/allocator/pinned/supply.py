"""Where pinned memory comes from and goes to: calls of the driver, and what they change."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

from cudakit.core.allocator.blocks import RawStack
from cudakit.core.allocator.history import SEGMENT_ALLOC, SEGMENT_FREE, History
from cudakit.core.allocator.pinned.blocks import HostBlock, HostSegment
from cudakit.core.allocator.pinned.pools import HostPool
from cudakit.core.allocator.pinned.statistics import HostStatistics
from cudakit.core.allocator.pinned.upstream import HostUpstream, Registering
from cudakit.errors import CudaError, Unsupported
from cudakit.torch_rules.settings import Settings

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY (CUDA Driver API, CUresult)


class Supply:
    """What the driver gave. Whatever a call raises, all is as it was before.

    The reserve is of the default pool, which makes blocks of it for all.
    """

    def __init__(
        self, upstream: HostUpstream, default: HostPool, statistics: HostStatistics
    ) -> None:
        self._upstream = upstream
        self._store = default.store
        self._statistics = statistics
        self.reserve: HostSegment | None = None
        self._take: Callable[[int], int] = upstream.malloc

    def configure(self, settings: Settings) -> None:
        """Take memory as the settings say. Raises Unsupported where the upstream cannot."""
        self._take = self._upstream.malloc
        if settings.pinned_use_cuda_host_register:
            self._take = self._registering(settings.pinned_num_register_threads)

    def _registering(self, threads: int) -> Callable[[int], int]:
        upstream = self._upstream
        if not isinstance(upstream, Registering):
            raise Unsupported(
                "this upstream cannot register memory of the host",
                hint="leave out pinned_use_cuda_host_register, or take the memory of a Gpu",
            )
        return lambda size_bytes: upstream.malloc_registered(size_bytes, threads)

    def obtain(
        self, size: int, pool: HostPool, recorder: History | None, stack: RawStack | None
    ) -> HostBlock | None:
        """Take a block from the reserve or from the driver; None where it has no more. Raises CudaError."""
        block = self._store.carve(size)
        if block is None:
            size_bytes, kind = pool.store.segment(size)
            ptr = self._malloc(size_bytes)
            if ptr is None:
                return None
            block = HostBlock(ptr, size_bytes, HostSegment(ptr, size_bytes, kind))
        self._statistics.obtained(block.size)
        if recorder is not None:
            recorder.record(SEGMENT_ALLOC, block.ptr, block.size, 0, stack, pool.id)
        return block

    def set_aside(self, size_bytes: int) -> bool:
        """Take the reserve from the driver; False where it has no more. Raises CudaError."""
        ptr = self._malloc(size_bytes)
        if ptr is None:
            return False
        self.reserve = HostSegment(ptr, size_bytes, "reserve")
        self._store.set_aside(self.reserve)
        if self._store.divides:  # else each block of it is counted when it is made
            self._statistics.obtained(size_bytes)
        return True

    def give_back(
        self,
        block: HostBlock,
        pool: HostPool,
        recorder: History | None,
        stack: RawStack | None = None,
    ) -> None:
        """Give a free block back that is all the driver gave in one piece, unless it is of the reserve.

        Raises CudaError, and keeps it then.
        """
        if block.segment.kind == "reserve":
            return
        self._free(block.ptr)
        pool.store.discard(block)
        self._statistics.given_back(block.size)
        if recorder is not None:
            recorder.record(SEGMENT_FREE, block.ptr, block.size, 0, stack, pool.id)

    def give_back_all(
        self, pool: HostPool, recorder: History | None, stack: RawStack | None = None
    ) -> int:
        """Give every such block back; return how many bytes. Raises CudaError at the first refused."""
        given = 0
        for block in [block for block in pool.store if block.whole]:
            if block.segment.kind != "reserve":
                self.give_back(block, pool, recorder, stack)
                given += block.size
        return given

    def close(self, *, used: bool) -> None:
        """Give the reserve back, unless anything of it is still used. Raises CudaError."""
        if self.reserve is not None and not used:
            self._free(self.reserve.ptr)
            self.reserve = None
            for block in [block for block in self._store if block.segment.kind == "reserve"]:
                self._store.discard(block)
                self._statistics.given_back(block.size)
            self._store.set_aside(None)

    def _malloc(self, size_bytes: int) -> int | None:
        begin = perf_counter_ns()
        try:
            ptr = self._take(size_bytes)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            return None
        self._statistics.alloc_time.add((perf_counter_ns() - begin) // 1000)
        return ptr

    def _free(self, ptr: int) -> None:
        begin = perf_counter_ns()
        try:
            self._upstream.free(ptr)
        except CudaError:
            self._statistics.num_free_failures += 1
            raise
        self._statistics.free_time.add((perf_counter_ns() - begin) // 1000)
