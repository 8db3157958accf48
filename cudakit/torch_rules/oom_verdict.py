"""The verdict on a failed request in a snapshot: its cause in one sentence, and ranked remedies."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cudakit.torch_rules.oom_facts import Fit, fit_of
from cudakit.torch_rules.sizes import MIB, segment_size
from cudakit.units import format_bytes

_CONF = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A request that failed, and the memory at that moment; in bytes."""

    size: int
    device_free: int
    reserved: int
    active: int  # blocks in use and pending free
    free: int  # in free blocks of any pool
    own_free: int  # in free blocks that could have served the request
    own_largest: int  # the largest of those blocks
    later_largest: int  # the same once pending frees are complete
    other_largest: int  # the largest of the other free blocks
    releasable: int  # in segments without a block in use
    releasable_private: int  # of that, in private pools
    pending: int  # blocks freed, still used by another stream
    expandable: bool  # expandable segments are in use
    split_limited: bool  # max_split_size_mb is set

    @property
    def needed(self) -> int:
        """The segment that would have had to be allocated."""
        return segment_size(self.size)

    @property
    def limited(self) -> bool:
        """Whether the device had memory left, so that a limit of the process refused."""
        return self.device_free >= self.needed

    @property
    def usable(self) -> int:
        """What the process could still have allocated from the device."""
        return 0 if self.limited else self.device_free

    @property
    def short(self) -> int:
        """What is missing even if every free byte could be used."""
        return max(self.size - self.free - self.usable, 0)

    @property
    def fit(self) -> Fit:
        """Which single change would have let the request fit."""
        return fit_of(
            block_bytes=self.size,
            segment_bytes=self.needed,
            usable_bytes=self.usable,
            releasable_bytes=self.releasable,
            own_free_bytes=self.own_free,
            largest_other_bytes=self.other_largest,
            largest_later_bytes=self.later_largest,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a request failed, as a code and in words, and what to do."""

    code: str
    sentence: str
    remedies: tuple[str, ...]


def verdict_of(failed: FailedRequest) -> Verdict:
    """Return the cause that is easiest to remove: cache, pending frees, fragmentation, pools, capacity."""
    found = _cause(failed)
    if not failed.limited or found.code == "limit":
        return found
    return replace(found, remedies=(*found.remedies, _raise_the_limit(failed)))


def _cause(failed: FailedRequest) -> Verdict:
    fit = failed.fit
    if fit.without_cache:
        return _cache(failed)
    if fit.after_pending_frees:
        return _pending(failed)
    if fit.without_holes:
        return _fragmentation(failed)
    if fit.in_another_pool or not failed.short:
        return _pool(failed)
    return _limit(failed) if failed.limited else _capacity(failed)


def _raise_the_limit(failed: FailedRequest) -> str:
    least = format_bytes(failed.reserved + failed.needed)
    return f"raise torch.cuda.set_per_process_memory_fraction, to at least {least} for this request"


def _would_fit(failed: FailedRequest, code: str, change: str, *remedies: str) -> Verdict:
    """Return the verdict on a request that would have fitted after a change."""
    limit = ""
    if failed.limited:
        limit = (
            f"; the device had {format_bytes(failed.device_free)} free, so a limit of the process "
            f"(set_per_process_memory_fraction) kept it at {format_bytes(failed.reserved)}"
        )
    asked = format_bytes(failed.size)
    return Verdict(code, f"{asked} did not fit, but would have fitted {change}{limit}.", remedies)


def _cache(failed: FailedRequest) -> Verdict:
    remedies = []
    if failed.releasable_private:
        remedies.append(
            "delete the CUDA graphs and MemPools that are no longer used: empty segments of a private "
            "pool go back with the pool only"
        )
    if failed.releasable > failed.releasable_private:
        remedies.append(
            "call torch.cuda.empty_cache() before this allocation; while a graph is captured PyTorch "
            "gives nothing back"
        )
    change = (
        f"without the cache: {format_bytes(failed.releasable)} lie in empty segments that were not "
        "given back"
    )
    return _would_fit(failed, "cache", change, *remedies)


def _pending(failed: FailedRequest) -> Verdict:
    if failed.own_largest < failed.size:
        waiting = (
            f"{format_bytes(failed.pending)} were freed but still in use by other streams "
            "(record_stream)"
        )
    else:
        waiting = (
            f"a hole of {format_bytes(failed.own_largest)} became free only after PyTorch had "
            "searched, when it waited for the other streams that used it (record_stream)"
        )
    return _would_fit(
        failed,
        "pending",
        f"a moment later: {waiting}",
        "wait for the side stream before the tensor is freed "
        "(torch.cuda.current_stream().wait_stream(side)), instead of record_stream",
        "call torch.cuda.synchronize() before this allocation",
    )


def _fragmentation(failed: FailedRequest) -> Verdict:
    on_device = not failed.limited and failed.own_free < failed.size
    device = f" and {format_bytes(failed.device_free)} on the device" if on_device else ""
    change = (
        f"without holes: {format_bytes(failed.own_free)} are free inside reserved segments{device}, "
        f"but the largest hole is {format_bytes(failed.own_largest)}"
    )
    split: tuple[str, ...] = ()
    if not (failed.expandable or failed.split_limited):
        # A limit above the failed size; torch accepts none up to 20 MiB.
        split = (f"{_CONF}=max_split_size_mb:{max(failed.size // MIB, 21)}",)
    return _would_fit(
        failed,
        "fragmentation",
        change,
        *_expandable_remedy(failed),
        "free, or allocate first, the small long-lived blocks that pin the segments "
        "(see what pins them, below)",
        *split,
    )


def _pool(failed: FailedRequest) -> Verdict:
    where = (
        "into another pool or stream"
        if failed.fit.in_another_pool
        else "if pools and streams shared their memory"
    )
    elsewhere = format_bytes(failed.free - failed.own_free)
    return _would_fit(
        failed,
        "pool",
        f"{where}: {elsewhere} are free where this request may not go",
        "allocate on the stream that holds the free memory, or call torch.cuda.empty_cache() first",
        "let CUDA graphs share one pool (torch.cuda.graph(..., pool=...)), "
        "and delete MemPools that are no longer used",
        *_expandable_remedy(failed),
    )


def _limit(failed: FailedRequest) -> Verdict:
    sentence = (
        f"{format_bytes(failed.size)} met a limit of the process, not of the device: the device had "
        f"{format_bytes(failed.device_free)} free while this process held "
        f"{format_bytes(failed.reserved)}."
    )
    return Verdict("limit", sentence, (_raise_the_limit(failed), _hold_less(failed)))


def _capacity(failed: FailedRequest) -> Verdict:
    sentence = (
        f"{format_bytes(failed.size)} could not fit: {format_bytes(failed.active)} were in use, "
        f"{format_bytes(failed.device_free)} free on the device and {format_bytes(failed.free)} in holes, "
        f"which is {format_bytes(failed.short)} too little even with every free byte usable."
    )
    holes = _expandable_remedy(failed) if failed.free else ()
    return Verdict("capacity", sentence, (_hold_less(failed), *holes))


def _hold_less(failed: FailedRequest) -> str:
    return (
        f"hold {format_bytes(failed.short)} less at this moment: a smaller batch, activation "
        "checkpointing, or the top holders below (with --at oom)"
    )


def _expandable_remedy(failed: FailedRequest) -> tuple[str, ...]:
    return () if failed.expandable else (f"{_CONF}=expandable_segments:True",)
