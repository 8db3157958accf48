"""A failed allocation in a snapshot, and the change that would have let it succeed."""

from __future__ import annotations

from dataclasses import dataclass

from cudakit.torch_rules.oom import Fit, fit_of
from cudakit.torch_rules.sizes import segment_size
from cudakit.units import format_bytes


@dataclass(frozen=True, slots=True)
class AllocatorCalls:
    """The variables and calls that control the allocator that wrote a snapshot."""

    settings_variable: str
    empty_cache: str
    set_limit: str
    wait_for_stream: str
    synchronize: str
    record_trace: str
    record_stacks: str  # the argument of ``record_trace`` that records more call stacks
    mark_step: str


PYTORCH_CALLS = AllocatorCalls(
    settings_variable="PYTORCH_CUDA_ALLOC_CONF",
    empty_cache="torch.cuda.empty_cache()",
    set_limit="torch.cuda.set_per_process_memory_fraction",
    wait_for_stream="torch.cuda.current_stream().wait_stream(side), instead of record_stream",
    synchronize="torch.cuda.synchronize()",
    record_trace="torch.cuda.memory._record_memory_history()",
    record_stacks='stacks="all"',
    mark_step="torch.profiler.record_function(f'step {i}')",
)
CUDAKIT_CALLS = AllocatorCalls(
    settings_variable="CUDAKIT_ALLOC_CONF",
    empty_cache="CachingAllocator.empty_cache()",
    set_limit="CachingAllocator.set_memory_fraction",
    wait_for_stream="an event of the side stream, instead of record_use",
    synchronize="process_events() after a device synchronization",
    record_trace="CachingAllocator.record_history()",
    record_stacks='context="all"',
    mark_step="CachingAllocator.annotated(f'step {i}')",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A request that failed, and the memory at that moment; in bytes.

    "Own" free blocks are those in the request's pool, size class and stream, which can serve the request.
    """

    size_bytes: int
    device_free_bytes: int
    reserved_bytes: int
    active_bytes: int  # bytes in blocks in use or pending free
    free_bytes: int  # bytes in free blocks of all pools
    own_free_bytes: int  # bytes in own free blocks
    own_largest_bytes: int  # size of the largest own free block
    later_largest_bytes: int  # size of the largest own free block once pending frees are complete
    # size of the largest free block of other pools, size classes and streams
    other_largest_bytes: int
    releasable_bytes: int  # bytes in segments without a block in use
    releasable_private_bytes: int  # the part of ``releasable_bytes`` in private pools
    pending_bytes: int  # bytes in blocks that are pending free
    is_expandable: bool  # whether expandable segments are in use
    is_split_limited: bool  # whether max_split_size_mb is set
    calls: AllocatorCalls = PYTORCH_CALLS

    @property
    def needed_bytes(self) -> int:
        """The size of the new segment that the request needed."""
        return segment_size(self.size_bytes)

    @property
    def is_limited(self) -> bool:
        """Whether a limit of the process rejected the request although the device had enough memory."""
        return self.device_free_bytes >= self.needed_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes that the process could still get from the device."""
        return 0 if self.is_limited else self.device_free_bytes

    @property
    def short_bytes(self) -> int:
        """Bytes that are missing even if all free memory could be used."""
        return max(self.size_bytes - self.free_bytes - self.usable_bytes, 0)

    @property
    def fit(self) -> Fit:
        """The single changes that would each have let the request succeed."""
        return fit_of(
            block_bytes=self.size_bytes,
            segment_bytes=self.needed_bytes,
            usable_bytes=self.usable_bytes,
            releasable_bytes=self.releasable_bytes,
            own_free_bytes=self.own_free_bytes,
            largest_other_bytes=self.other_largest_bytes,
            largest_later_bytes=self.later_largest_bytes,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The single change that would have let a failed request succeed: a code, the reason, and the action."""

    code: str  # "cache", "pending", "fragmentation", "pool", "limit" or "capacity"
    reason: str  # a clause without a period; empty for "limit" and "capacity"
    remedy: str = ""  # an action; empty if no action helps in every program


def verdict_of(request: FailedRequest) -> Verdict:
    """Return the first change that helps: cache, pending frees, fragmentation, pools, limit, capacity."""
    fit = request.fit
    if fit.without_cache:
        return _cache_verdict(request)
    if fit.after_pending_frees:
        return _pending_verdict(request)
    if fit.without_holes:
        return _fragmentation_verdict(request)
    if fit.in_another_pool or not request.short_bytes:
        return _pool_verdict(request)
    return Verdict("limit" if request.is_limited else "capacity", "")


def _cache_verdict(request: FailedRequest) -> Verdict:
    remedies = []
    if request.releasable_private_bytes:
        remedies.append(
            "delete CUDA graphs and MemPools that are no longer used: the empty segments of a private"
            " pool are released only with the pool"
        )
    if request.releasable_bytes > request.releasable_private_bytes:
        remedies.append(
            f"call {request.calls.empty_cache} before this allocation; during graph capture no memory"
            " can be released"
        )
    reason = (
        f"{format_bytes(request.releasable_bytes)} is in empty segments that were not released to the device"
        " (cache)"
    )
    return Verdict("cache", reason, "; ".join(remedies))


def _pending_verdict(request: FailedRequest) -> Verdict:
    if request.own_largest_bytes < request.size_bytes:
        reason = (
            f"{format_bytes(request.pending_bytes)} was freed, but other streams may still use it"
        )
    else:
        reason = (
            f"a block of {format_bytes(request.own_largest_bytes)} became free only after the search for a"
            " free block, when other streams had finished with it"
        )
    return Verdict(
        "pending",
        f"{reason} (pending free)",
        f"wait for the side stream before the memory is freed: {request.calls.wait_for_stream}; or call"
        f" {request.calls.synchronize} before this allocation",
    )


def _fragmentation_verdict(request: FailedRequest) -> Verdict:
    reports_device_memory = not request.is_limited and request.own_free_bytes < request.size_bytes
    device_text = (
        f" and {format_bytes(request.device_free_bytes)} on the device"
        if reports_device_memory
        else ""
    )
    return Verdict(
        "fragmentation",
        f"{format_bytes(request.own_free_bytes)} is free in the segments that can serve the request"
        f"{device_text}, but the largest free block is {format_bytes(request.own_largest_bytes)}"
        " (fragmentation)",
    )


def _pool_verdict(request: FailedRequest) -> Verdict:
    return Verdict(
        "pool",
        f"{format_bytes(request.free_bytes - request.own_free_bytes)} is free in segments of other pools,"
        " streams or size classes, which cannot serve the request (pool)",
    )
