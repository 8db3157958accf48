"""Before memory runs out: what is tried, in PyTorch's order, and the error when all of it fails.

Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (DeviceCachingAllocator::malloc).
"""

from __future__ import annotations

from cudakit.core.allocator import release
from cudakit.core.allocator.block import Block
from cudakit.core.allocator.cache import OUT_OF_MEMORY, Cache, Request
from cudakit.core.allocator.events import Uses
from cudakit.errors import CudaError
from cudakit.torch_rules.oom_facts import OomReport
from cudakit.torch_rules.oom_message import details, message_of
from cudakit.torch_rules.oom_remedies import hint_of

_NAME = "CUDA_ERROR_OUT_OF_MEMORY"


class OutOfMemory(CudaError, MemoryError):
    """No memory for a request. ``report`` is None where it was refused before anything was looked at.

    Also a MemoryError, which is what programs of CuPy, Numba and RMM look for. ``message`` is one line,
    which begins as PyTorch's does; as a string it is followed by where the memory is, and by what would have
    helped.
    """

    def __init__(
        self, explanation: str, *, hint: str = "", report: OomReport | None = None
    ) -> None:
        super().__init__(OUT_OF_MEMORY, _NAME, explanation, hint=hint)
        self.message = f"CUDA out of memory. {explanation}"
        self.args = (self.message,)
        self.report = report

    def __str__(self) -> str:
        return f"{self.message}\n{details(self.report)}" if self.report else self.message


def out_of_memory(report: OomReport) -> OutOfMemory:
    """Make the error for a request that nothing could serve."""
    return OutOfMemory(message_of(report), hint=hint_of(report), report=report)


def obtain(
    cache: Cache, uses: Uses, request: Request, *, capturing: bool, search_again: bool
) -> Block | None:
    """Get a block for a request that no free block serves; None where there is no memory.

    While a stream is captured nothing is waited for. ``search_again`` looks once more at what became free
    by waiting, which PyTorch does not (its issue 189504).
    """
    block = cache.new_segment(request) or _borrow(cache, request)
    if block is None and release.release_available(cache, request):
        block = cache.new_segment(request)
    if block is not None or capturing:
        return block
    release.empty_cache(cache, uses, request.stack)
    cache.statistics.num_alloc_retries += 1
    block = cache.new_segment(request)
    if block is None and search_again:
        block = cache.find(request.pool, request.size, request.stream)
        cache.statistics.num_sync_rescues += block is not None
    return block


def _borrow(cache: Cache, request: Request) -> Block | None:
    """Take a free block of a private pool that lends to the default one (PyTorch's try_mempool_fallback).

    As there, none of a segment that grows, and no call of the driver.
    """
    if request.pool.id != cache.default.id:
        return None
    for pool in cache.private.lenders():
        kind = pool.small if request.pool.small else pool.large
        block = cache.find_lent(kind, request.size, request.stream)
        if block is not None:
            return block
    return None


def is_rejected(cache: Cache, request: Request) -> bool:
    """Say whether a request is beyond the limit, and is to be refused without any try.

    Source: the setting throw_on_cudamalloc_oom of PyTorch 2.12 (its pull request 179473).
    """
    beyond = cache.reserved_bytes + request.segment_bytes > cache.limit_bytes
    return beyond and cache.settings.throw_on_cudamalloc_oom
