"""Causes of a failed allocation outside the program: limits, memory of other processes, unusable memory.

Each function returns the evidence for one cause, or None.
"""

from __future__ import annotations

from typing import Final

from cudakit.memory.result import Cause
from cudakit.memory.verdict.failure import Failure
from cudakit.torch_rules.oom_verdict import verdict_of
from cudakit.torch_rules.sizes import MIB
from cudakit.units import format_bytes, round_up_bytes

# Free memory below this share of the reserved memory is normal for the caching allocator.
LARGE_FREE_SHARE = 0.1
# Upper bound of the memory of a CUDA context with its libraries: the larger of this size and
# this share of the device's memory.
_CONTEXT_BYTES, _CONTEXT_SHARE = 1536 * MIB, 0.04


def request_too_large(failure: Failure) -> Cause | None:
    """Return evidence that the request alone is larger than all memory that the process could have."""
    request_bytes, available_bytes = failure.request.size_bytes, failure.available_bytes
    if request_bytes <= available_bytes:
        return None
    limit_clause = (
        "the device has" if failure.device_total_bytes else "this process could have had at most"
    )
    return Cause(
        "request_too_large",
        request_bytes - available_bytes,
        sufficient=True,
        sentence=(
            f"the request alone is {format_bytes(request_bytes)},"
            f" and {limit_clause} {format_bytes(available_bytes)}"
        ),
        remedy="compute this result in parts, or with less precision",
        stack=failure.stacks.frames(failure.stack),
        site=failure.stacks.site_index(failure.stack),
    )


def process_limit(failure: Failure) -> Cause | None:
    """Return evidence that a limit of this process refused the request although the device had memory."""
    request = failure.request
    if not request.is_limited:
        return None
    limit_text = "a limit of this process"
    if failure.memory_fraction is not None:
        limit_text += f" ({failure.memory_fraction:.3g} of the device)"
    return Cause(
        "process_limit",
        request.device_free_bytes,
        sufficient=True,
        sentence=(
            f"{limit_text} refused a new segment of {format_bytes(request.needed_bytes)}:"
            f" when the request failed, {format_bytes(request.reserved_bytes)} was reserved, and"
            f" {format_bytes(request.device_free_bytes)} of the device was free"
        ),
        remedy=limit_remedy(failure, None),
    )


def limit_remedy(failure: Failure, replayed_bytes: int | None) -> str:
    """Return the remedy for a limit: a new fraction, or a factor if the device size is unknown.

    ``replayed_bytes`` is a limit that let the request succeed in a replay, or None.
    """
    request = failure.request
    needed_bytes = round_up_bytes(
        request.reserved_bytes + request.needed_bytes if replayed_bytes is None else replayed_bytes
    )
    source_text = (
        " for the reserved memory and the new segment"
        if replayed_bytes is None
        else ", as replays with several limits show"
    )
    # Without a recorded fraction the limit is unknown, but it was at least the highest reserved memory.
    allowed_bytes = max(int(failure.trace_replay.curves.reserved[: failure.event + 1].max()), 1)
    if failure.device_total_bytes:
        fraction = min(-(-1000 * needed_bytes // failure.device_total_bytes) / 1000, 1.0)
        new_limit_text = (
            f"to a fraction of at least {fraction:.3f} ({format_bytes(needed_bytes)} of the device)"
        )
    else:
        factor = max(-(-100 * needed_bytes // allowed_bytes) / 100, 1.01)
        new_limit_text = (
            f"to at least {factor:.2f} times the present fraction: a limit of {format_bytes(needed_bytes)} is"
            f" needed{source_text}, and the present limit is at least {format_bytes(allowed_bytes)}, the most"
            " that was reserved before the failure"
        )
    return f"raise the limit with {request.calls.set_limit} {new_limit_text}"


def other_processes(failure: Failure) -> Cause | None:
    """Return evidence that other processes or libraries hold the missing memory."""
    request, outside_bytes = failure.request, failure.outside_bytes
    if request.is_limited or not is_shared(failure):
        return None
    return Cause(
        "other_processes",
        outside_bytes,
        sufficient=outside_bytes + request.device_free_bytes >= request.needed_bytes,
        sentence=(
            f"{format_bytes(outside_bytes)} of the device is in use outside this"
            f" allocator{_outside_holders_text(failure)};"
            f" {format_bytes(request.reserved_bytes)} is reserved here and"
            f" {format_bytes(request.device_free_bytes)} is free"
        ),
        remedy=(
            "free that memory: `cudakit devices` lists the processes, and `cudakit run --memory` the"
            " allocations of other libraries"
        ),
    )


def is_shared(failure: Failure) -> bool:
    """Return whether more memory is in use outside the allocator than a CUDA context takes."""
    return failure.outside_bytes >= max(_CONTEXT_BYTES, _CONTEXT_SHARE * failure.available_bytes)


def _outside_holders_text(failure: Failure) -> str:
    """Return a part of a sentence: the libraries and processes that hold memory outside the allocator."""
    if not failure.libraries:
        return ", by other processes or other libraries of this process"
    unattributed_bytes = failure.outside_bytes - sum(
        reserved_bytes for _, reserved_bytes in failure.libraries
    )
    holder_texts = [
        f"{format_bytes(reserved_bytes)} by {name} in this process"
        for name, reserved_bytes in failure.libraries
    ]
    if unattributed_bytes > 0:
        holder_texts.append(
            f"{format_bytes(unattributed_bytes)} by other processes and CUDA contexts"
        )
    return f" ({', '.join(holder_texts)})"


_UNUSABLE_REMEDIES: Final = {
    "pool": "allocate on the stream that has the free memory, let CUDA graphs share one pool, and delete"
    " graphs and MemPools that are no longer used",
    "fragmentation": "free the long-lived blocks that keep segments in use, or allocate them first",
}


def fragmentation(failure: Failure) -> Cause | None:
    """Return evidence that segments have free memory that the request cannot use."""
    request, verdict = failure.request, verdict_of(failure.request)
    unusable_bytes = request.free_bytes + (
        request.pending_bytes if verdict.code == "pending" else 0
    )
    is_sufficient = verdict.code not in ("limit", "capacity")
    if not unusable_bytes or not (
        is_sufficient or unusable_bytes >= LARGE_FREE_SHARE * request.reserved_bytes
    ):
        return None
    reason = verdict.reason
    if not is_sufficient:
        largest_bytes = max(request.own_largest_bytes, request.other_largest_bytes)
        reason = (
            f"{format_bytes(request.free_bytes)} is free in segments, but the largest free block is"
            f" {format_bytes(largest_bytes)}; all of the free memory is less than the request, so that"
            " fragmentation is only a part of the cause"
        )
    remedy = verdict.remedy or _UNUSABLE_REMEDIES.get(
        verdict.code, _UNUSABLE_REMEDIES["fragmentation"]
    )
    return Cause(
        "fragmentation", unusable_bytes, sufficient=is_sufficient, sentence=reason, remedy=remedy
    )
