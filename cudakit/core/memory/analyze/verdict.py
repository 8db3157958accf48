"""One sentence on a failed allocation, and what to try, most promising first. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cudakit.core.memory.result import Fit, State
from cudakit.units import format_bytes

_CONF = "PYTORCH_CUDA_ALLOC_CONF"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """The room that a failed request had, in bytes."""

    size: int
    needed: int  # what would have to be reserved for it
    device_free: int
    free: int  # in holes, of any pool
    own_free: int  # in holes that could have served the request
    own_largest_hole: int
    releasable: int  # in segments that hold nothing
    releasable_private: int  # of that, in private pools
    pending: int  # blocks freed, still used by another stream
    short: int  # what is missing even if every free byte could be used
    limited: bool  # the device had room: something else refused
    expandable: bool  # expandable segments are in use
    fit: Fit


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why it failed, as a code and in words, and what to do."""

    code: str
    sentence: str
    remedies: tuple[str, ...]


def judge(room: Room, state: State, settings: Mapping[str, Any]) -> Verdict:
    """Choose the cause that, mended, is the least work: cache, pending frees, holes, pools, capacity."""
    found = _cause(room, state, settings)
    if not room.limited or found.code == "limit":
        return found
    return replace(found, remedies=(*found.remedies, _raise_the_limit(room, state)))


def _cause(room: Room, state: State, settings: Mapping[str, Any]) -> Verdict:
    fit = room.fit
    if fit.without_cache:
        return _cache(room, state)
    if fit.after_pending_frees:
        return _pending(room, state)
    if fit.without_holes:
        return _fragmentation(room, state, settings)
    if fit.in_another_pool or not room.short:
        return _pool(room, state)
    return _limit(room, state) if room.limited else _capacity(room, state)


def _raise_the_limit(room: Room, state: State) -> str:
    least = format_bytes(state.reserved_bytes + room.needed)
    return f"raise torch.cuda.set_per_process_memory_fraction, to at least {least} for this request"


def _cache(room: Room, state: State) -> Verdict:
    sentence = (
        f"{_asked(room)} would have fitted without the cache: {format_bytes(room.releasable)} lie in "
        f"empty segments that were not given back{_limit_clause(room, state)}."
    )
    remedies = []
    if room.releasable_private:
        remedies.append(
            "delete the CUDA graphs and MemPools that are no longer used: empty segments of a private "
            "pool go back with the pool only"
        )
    if room.releasable > room.releasable_private:
        remedies.append(
            "call torch.cuda.empty_cache() before this allocation; while a graph is captured PyTorch "
            "gives nothing back"
        )
    return Verdict("cache", sentence, tuple(remedies))


def _pending(room: Room, state: State) -> Verdict:
    sentence = (
        f"{_asked(room)} would have fitted a moment later: {_waiting(room)}"
        f"{_limit_clause(room, state)}."
    )
    return Verdict(
        "pending",
        sentence,
        (
            "wait for the side stream before the tensor is freed "
            "(torch.cuda.current_stream().wait_stream(side)), instead of record_stream",
            "call torch.cuda.synchronize() before this allocation",
        ),
    )


def _waiting(room: Room) -> str:
    if room.own_largest_hole < room.size:
        freed = format_bytes(room.pending)
        return f"{freed} were freed but still in use by other streams (record_stream)"
    hole = format_bytes(room.own_largest_hole)
    return (
        f"a hole of {hole} became free only after PyTorch had searched, when it waited for the other "
        "streams that used it (record_stream)"
    )


def _fragmentation(room: Room, state: State, settings: Mapping[str, Any]) -> Verdict:
    device = f" and {format_bytes(room.device_free)} on the device" if not room.limited else ""
    sentence = (
        f"{_asked(room)} would have fitted without holes: {format_bytes(room.own_free)} are free inside "
        f"reserved segments{device if room.own_free < room.size else ''}, but the largest hole is "
        f"{format_bytes(room.own_largest_hole)}{_limit_clause(room, state)}."
    )
    remedies = [
        *_expandable_remedy(room),
        "free, or allocate first, the small long-lived blocks that pin the segments "
        "(see what pins them, below)",
        *_split_remedy(room, settings),
    ]
    return Verdict("fragmentation", sentence, tuple(remedies))


def _pool(room: Room, state: State) -> Verdict:
    elsewhere = format_bytes(room.free - room.own_free)
    where = (
        "into another pool or stream"
        if room.fit.in_another_pool
        else "if pools and streams shared their memory"
    )
    sentence = (
        f"{_asked(room)} would have fitted {where}: {elsewhere} are free where this request may not go"
        f"{_limit_clause(room, state)}."
    )
    return Verdict(
        "pool",
        sentence,
        (
            "allocate on the stream that holds the free memory, or call torch.cuda.empty_cache() first",
            "let CUDA graphs share one pool (torch.cuda.graph(..., pool=...)), "
            "and delete MemPools that are no longer used",
            *_expandable_remedy(room),
        ),
    )


def _limit(room: Room, state: State) -> Verdict:
    sentence = (
        f"{_asked(room)} met a limit of the process, not of the device: the device had "
        f"{format_bytes(room.device_free)} free while this process held "
        f"{format_bytes(state.reserved_bytes)}."
    )
    return Verdict(
        "limit",
        sentence,
        (
            _raise_the_limit(room, state),
            *_less(room),
        ),
    )


def _capacity(room: Room, state: State) -> Verdict:
    sentence = (
        f"{_asked(room)} could not fit: {format_bytes(state.active_bytes)} were in use, "
        f"{format_bytes(room.device_free)} free on the device and {format_bytes(room.free)} in holes, "
        f"which is {format_bytes(room.short)} too little even with every free byte usable."
    )
    holes = _expandable_remedy(room) if room.free else ()
    return Verdict("capacity", sentence, (*_less(room), *holes))


def _less(room: Room) -> tuple[str, ...]:
    return (
        f"hold {format_bytes(room.short)} less at this moment: a smaller batch, activation "
        "checkpointing, or the top holders below (with --at oom)",
    )


def _asked(room: Room) -> str:
    asked = format_bytes(room.size)
    return f"{asked} did not fit, but" if _could(room) else asked


def _could(room: Room) -> bool:
    fit = room.fit
    usable = fit.without_cache or fit.without_holes or fit.after_pending_frees
    return usable or fit.in_another_pool or not room.short


def _limit_clause(room: Room, state: State) -> str:
    if not room.limited:
        return ""
    return (
        f"; the device had {format_bytes(room.device_free)} free, so a limit of the process "
        f"(set_per_process_memory_fraction) kept it at {format_bytes(state.reserved_bytes)}"
    )


def _expandable_remedy(room: Room) -> tuple[str, ...]:
    return () if room.expandable else (f"{_CONF}=expandable_segments:True",)


def _split_remedy(room: Room, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Keep blocks larger than the failed size whole; torch takes no limit up to 20 MiB."""
    if room.expandable or settings.get("max_split_size", -1) not in (-1, None):
        return ()
    limit_mib = max(room.size // _MIB, 21)
    return (f"{_CONF}=max_split_size_mb:{limit_mib}",)
