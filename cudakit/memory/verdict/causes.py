"""All causes of a failed allocation in their order, the root cause first.

The ids and their meanings are in docs/explanation/memviz.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from cudakit.memory.result import Cause, DiffRow
from cudakit.memory.snapshot import Ints, Mask, StackTable, site_name, take
from cudakit.memory.steps import (
    growing_stacks,
    growth_between,
    is_growing,
    is_inner_call,
    is_rising,
)
from cudakit.memory.verdict.failure import Failure, obstacle_of
from cudakit.stacks import Frame
from cudakit.units import MIB, format_bytes, format_count, round_up_bytes

# --- outside the program: limits, memory of other processes, unusable memory -----------------------
#
# Each function returns the evidence for one cause, or None.

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
        **failure.call_site,
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
    allowed_bytes = max(failure.highest_reserved_bytes, 1)
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
    holders_text = ", by other processes or other libraries of this process"
    if failure.libraries:
        texts = [
            f"{format_bytes(size)} by {name} in this process" for name, size in failure.libraries
        ]
        unattributed_bytes = outside_bytes - failure.library_bytes
        if unattributed_bytes > 0:
            texts.append(f"{format_bytes(unattributed_bytes)} by other processes and CUDA contexts")
        holders_text = f" ({', '.join(texts)})"
    return Cause(
        "other_processes",
        outside_bytes,
        sufficient=outside_bytes + request.device_free_bytes >= request.needed_bytes,
        sentence=(
            f"{format_bytes(outside_bytes)} of the device is in use outside this allocator{holders_text};"
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


def fragmentation(failure: Failure) -> Cause | None:
    """Return evidence that segments have free memory that the request cannot use."""
    request, obstacle = failure.request, obstacle_of(failure.request)
    unusable_bytes = request.free_bytes
    if obstacle.code == "pending":
        unusable_bytes += request.pending_bytes
    is_sufficient = obstacle.code not in ("limit", "capacity")
    is_large = unusable_bytes >= LARGE_FREE_SHARE * request.reserved_bytes
    if not unusable_bytes or not (is_sufficient or is_large):
        return None
    reason = obstacle.reason
    if not is_sufficient:
        largest_bytes = max(request.own_largest_bytes, request.other_largest_bytes)
        reason = (
            f"{format_bytes(request.free_bytes)} is free in segments, but the largest free block is"
            f" {format_bytes(largest_bytes)}; all of the free memory is less than the request, so that"
            " fragmentation is only a part of the cause"
        )
    return Cause(
        "fragmentation",
        unusable_bytes,
        sufficient=is_sufficient,
        sentence=reason,
        remedy=obstacle.remedy,
    )


# --- in the program: the memory that it holds, and the growth of this memory ------------------------
#
# Each function returns the evidence for one cause, or None.

# A cause below this share of the memory in use is noise.
_MIN_CAUSE_SHARE = 0.02
# Minimum excess of a step with a one-off peak over the highest earlier step, as a share of that step.
_MIN_EXCESS_SHARE = 0.15
# In a trace without steps: a phase (the first run of a statement) must have at least this share of the needed
# memory, and so must the memory in use before the phase.
_MIN_PHASE_SHARE = 0.1
# Minimum number of live blocks of a call site that is reported to accumulate blocks.
_MIN_ACCUMULATED_BLOCKS = 8


def retained(failure: Failure) -> Cause | None:
    """Return evidence that blocks of some call sites accumulate from step to step."""
    growing = growing_stacks(failure.history.allocations, failure.steps.bounds, failure.event)
    if not len(growing.ids):
        return None
    added_blocks = growing.counts[:, -1] - growing.counts[:, 0]
    is_accumulating = (added_blocks >= 2) & is_growing(growing.counts)
    is_accumulating &= ~_calls_any(failure.stacks, growing.ids, _STATE_CALLS)
    stack_ids = growing.ids[is_accumulating]
    grown_bytes = (growing.bytes_at_end - growing.live_bytes[:, 0])[is_accumulating]
    total_bytes = int(grown_bytes.sum()) + _free_in_private_pools(failure, stack_ids)
    if total_bytes < _MIN_CAUSE_SHARE * failure.request.active_bytes or not len(stack_ids):
        return None
    call_site = failure.stacks.call_site(int(stack_ids[grown_bytes.argmax()]))
    step_count = int(growing.steps[-1] - growing.steps[0]) + 1
    block_count = int((growing.counts_at_end - growing.counts[:, 0])[is_accumulating].sum())
    return Cause(
        "retained",
        total_bytes,
        sufficient=total_bytes >= failure.request.short_bytes,
        sentence=(
            f"{format_bytes(total_bytes)} in {format_count(block_count)} blocks accumulated over"
            f" {format_count(step_count)} steps and was not freed, most of it allocated at"
            f" {_site_text(**call_site)}"
        ),
        remedy=(
            "delete the references to earlier steps (in lists, losses with their graphs, caught exceptions):"
            " detach the tensors that you keep, or keep numbers instead"
        ),
        **call_site,
    )


def growth(failure: Failure) -> Cause | None:
    """Return evidence that the peaks of the steps rise because requests get larger."""
    peaks = np.append(failure.earlier_peaks, failure.needed_bytes)
    if not is_rising(peaks):
        return None
    earlier_moment = failure.steps.peak_moment(len(peaks) // 4)
    rows = [
        row
        for row in _growth_since(failure, earlier_moment)
        if row.before_count and row.after_count
    ]
    growth_by_size = sum(map(_larger_bytes, rows))
    growth_by_count = sum(
        (row.after_count - row.before_count) * row.before_bytes // row.before_count
        for row in rows
        if row.after_count > row.before_count
    )
    if growth_by_size < max(growth_by_count, _MIN_CAUSE_SHARE * failure.needed_bytes):
        return None
    row = max(rows, key=_larger_bytes)
    growth_bytes = int(peaks[-1] - peaks[0])
    return Cause(
        "growth",
        growth_bytes,
        sufficient=growth_bytes >= failure.request.short_bytes,
        sentence=(
            f"the peak of each step rose from {format_bytes(int(peaks[0]))} to"
            f" {format_bytes(int(peaks[-1]))} (including the failed request) over"
            f" {format_count(len(peaks))} steps, because requests get larger, mainly at"
            f" {_site_text(row.stack, row.site)}"
        ),
        remedy=(
            f"limit the size that grows at {_site_text(row.stack, row.site)}: the length of sequences, the"
            " size of the batch, or the cache"
        ),
        stack=row.stack,
        site=row.site,
    )


def one_off_peak(failure: Failure) -> Cause | None:
    """Return evidence that the failing step needs much more memory than every step before it."""
    earlier_peaks = failure.earlier_peaks
    if not len(earlier_peaks):
        return None
    highest_earlier_peak = int(earlier_peaks.max())
    excess_bytes = failure.needed_bytes - highest_earlier_peak
    if (
        excess_bytes < _MIN_EXCESS_SHARE * highest_earlier_peak
        or excess_bytes < _MIN_CAUSE_SHARE * failure.request.active_bytes
    ):
        return None
    earlier_moment = failure.steps.peak_moment(int(earlier_peaks.argmax()))
    growth_rows = _growth_since(failure, earlier_moment)
    call_site = failure.call_site
    if growth_rows and growth_rows[0].change_bytes > failure.request.size_bytes:
        call_site = {"stack": growth_rows[0].stack, "site": growth_rows[0].site}
    return Cause(
        "one_off_peak",
        excess_bytes,
        sufficient=excess_bytes >= failure.request.short_bytes,
        sentence=(
            f"this step needs at least {format_bytes(failure.needed_bytes)}, and the {len(earlier_peaks):,}"
            f" {'step' if len(earlier_peaks) == 1 else 'steps'} before it needed at most"
            f" {format_bytes(highest_earlier_peak)}; most of the difference is from"
            f" {_site_text(**call_site)}"
        ),
        remedy="do this phase in smaller parts: a smaller batch, chunks, or without gradients",
        **call_site,
    )


def accumulated_blocks(failure: Failure) -> Cause | None:
    """Return evidence that a call site accumulates blocks until the failure, in a trace without steps."""
    allocations, failure_event = failure.history.allocations, failure.event
    if len(failure.steps):
        return None
    in_trace = take(allocations, (allocations.begin >= 0) & (allocations.begin < failure_event))
    live = take(in_trace, in_trace.end >= failure_event)
    n_stacks = len(failure.stacks.snapshot.stacks)
    live_counts = np.bincount(live.stack, minlength=n_stacks)
    is_never_freed = live_counts == np.bincount(in_trace.stack, minlength=n_stacks)
    live_bytes = np.bincount(live.stack, weights=live.size, minlength=n_stacks)
    candidates = np.flatnonzero(is_never_freed & (live_counts >= _MIN_ACCUMULATED_BLOCKS))
    # Layers keep their activations until the backward pass; stack 0 is empty.
    is_expected = _calls_any(failure.stacks, candidates, _STATE_CALLS | {"_call_impl"})
    is_expected |= candidates == 0
    live_bytes[np.setdiff1d(np.arange(n_stacks), candidates[~is_expected])] = 0
    stack_index = int(live_bytes.argmax())
    latest_event = live.begin[live.stack == stack_index].max(initial=0)
    if (
        live_bytes[stack_index] < 0.25 * failure.request.active_bytes
        or not live_bytes[stack_index]
        or latest_event < 0.75 * failure_event
    ):
        return None
    total_bytes, call_site = int(live_bytes[stack_index]), failure.stacks.call_site(stack_index)
    return Cause(
        "retained",
        total_bytes,
        sufficient=total_bytes >= failure.request.short_bytes,
        sentence=(
            f"{format_bytes(total_bytes)} in {int(live_counts[stack_index]):,} blocks accumulated at"
            f" {_site_text(**call_site)}, and none was freed"
        ),
        remedy="free these blocks earlier, or keep them in host memory",
        **call_site,
    )


def first_phase(failure: Failure) -> Cause | None:
    """Return evidence that a statement failed in its first run, after other statements allocated memory."""
    if len(failure.earlier_peaks) or not failure.stack:
        return None
    allocations, snapshot = failure.history.allocations, failure.stacks.snapshot
    live = failure.layout.allocation
    bytes_by_stack = np.bincount(allocations.stack[live], weights=allocations.size[live])
    # Frames of each call stack, outermost first. Stack 0 is empty: the statements of its blocks are unknown.
    stacks = {
        stack: snapshot.stacks[stack][::-1]
        for stack in np.flatnonzero(bytes_by_stack).tolist()
        if stack
    }
    bytes_with_stack = sum(int(bytes_by_stack[stack]) for stack in stacks)
    min_bytes = _MIN_PHASE_SHARE * failure.needed_bytes
    for depth, frame in enumerate(snapshot.stacks[failure.stack][::-1]):
        stacks = {
            stack: frames
            for stack, frames in stacks.items()
            if depth < len(frames) and frames[depth] == frame
        }
        if is_inner_call(snapshot.frames[frame]):
            return None  # the layers of a network are not phases of the program
        bytes_in_phase = sum(int(bytes_by_stack[stack]) for stack in stacks)
        bytes_before = bytes_with_stack - bytes_in_phase
        if bytes_before >= min_bytes:
            break
    else:
        return None
    needed_bytes = bytes_in_phase + failure.request.size_bytes
    if needed_bytes < min_bytes:
        return None
    return Cause(
        "one_off_peak",
        needed_bytes,
        sufficient=needed_bytes >= failure.request.short_bytes,
        sentence=(
            f"{site_name(snapshot.frames[frame])} needs at least {format_bytes(needed_bytes)} more than the"
            f" {format_bytes(bytes_before)} that was in use before it"
        ),
        remedy="let this phase need less: smaller parts, or less precise data; or free memory before it",
        **failure.call_site,
    )


def capacity(failure: Failure) -> Cause | None:
    """Return the cause of a failure without other causes: the program needs the memory that is in use."""
    request = failure.request
    return Cause(
        "capacity",
        request.short_bytes,
        sufficient=True,
        sentence=(
            f"the program needs this memory: {format_bytes(request.active_bytes)} was in use,"
            f" {format_bytes(request.free_bytes)} was free in segments and"
            f" {format_bytes(request.device_free_bytes)} on the device,"
            f" {format_bytes(request.short_bytes)} less than needed; no growth from step to step and no"
            " single phase explains it"
        ),
        remedy=(
            f"use at least {format_bytes(max(request.short_bytes, 0))} less at this moment: a smaller batch,"
            " activation checkpointing, or less in the largest call sites (--at oom lists them)"
        ),
    )


# --- call sites -----------------------------------------------------------------------------------

# Functions that allocate parameters of a network or the state of an optimizer, which stay in use.
_STATE_CALLS = frozenset({"_init_group", "_apply", "load_state_dict", "_load_from_state_dict"})


def _calls_any(stacks: StackTable, stack_ids: Ints, function_names: frozenset[str]) -> Mask:
    """Return which call stacks contain one of these functions of PyTorch."""
    frames = stacks.snapshot.frames
    is_call = [frame.name in function_names and "torch/" in frame.filename for frame in frames]
    calls = (any(is_call[i] for i in stacks.snapshot.stacks[stack]) for stack in stack_ids.tolist())
    return np.fromiter(calls, np.bool_, len(stack_ids))


def _free_in_private_pools(failure: Failure, stack_ids: Ints) -> int:
    """Return the free bytes of the private pools that hold blocks of these call stacks.

    The pool of a CUDA graph is released with the graph, which lives as long as the blocks.
    """
    layout = failure.layout
    is_of_stacks = np.isin(failure.history.allocations.stack[layout.allocation], stack_ids)
    pool_ids = np.unique(layout.segments.pool[layout.block_segment[is_of_stacks]])
    is_freed_with_blocks = np.isin(
        layout.segments.pool[layout.free_block_segment], pool_ids[pool_ids != 0]
    )
    return int(layout.free_block_size[is_freed_with_blocks].sum())


def _growth_since(failure: Failure, moment: int) -> tuple[DiffRow, ...]:
    return growth_between(failure.stacks, failure.history.allocations, moment, failure.event)


def _larger_bytes(row: DiffRow) -> int:
    """Return the growth in bytes that larger blocks cause, without the growth by more blocks."""
    return row.after_bytes - row.after_count * row.before_bytes // row.before_count


def _site_text(stack: tuple[Frame, ...], site: int) -> str:
    return site_name(stack[site]) if stack else "a call site that was not recorded"


CauseFunction: TypeAlias = Callable[[Failure], Cause | None]
# The order of causes: a cause comes before its consequences. The last three causes have weak evidence.
CAUSE_FUNCTIONS: Final[tuple[CauseFunction, ...]] = (
    request_too_large,
    retained,
    growth,
    process_limit,
    other_processes,
    one_off_peak,
    fragmentation,
    accumulated_blocks,
    first_phase,
    capacity,
)
# Causes that are compared with the free memory that the request could not use.
_COMPARED_WITH_FREE_MEMORY: Final = (retained, growth, one_off_peak)

# Causes that need the events before the failure, and take longer to find.
_NEEDS_HISTORY: Final = (retained, growth, one_off_peak, accumulated_blocks, first_phase)


def causes_of(failure: Failure, *, with_history: bool) -> tuple[Cause, ...]:
    """Return the causes of a failed allocation, the root cause first; there is at least one.

    If ``with_history`` is false, the causes that need the events before the failure are not searched.
    """
    causes = {
        function: cause
        for function in CAUSE_FUNCTIONS
        if (with_history or function not in _NEEDS_HISTORY)
        and (cause := function(failure)) is not None
    }
    if growth in causes:
        causes.pop(one_off_peak, None)
    ordered = sorted(causes.values(), key=lambda cause: not cause.sufficient)
    unusable = causes.get(fragmentation)
    if (
        unusable is not None
        and unusable.sufficient
        and unusable.bytes >= LARGE_FREE_SHARE * failure.request.reserved_bytes
        and all(
            unusable.bytes > cause.bytes
            for function, cause in causes.items()
            if function in _COMPARED_WITH_FREE_MEMORY
        )
    ):
        ordered.insert(0, unusable)
    cause_by_id: dict[str, Cause] = {}
    for cause in ordered:
        cause_by_id.setdefault(cause.id, cause)
    if len(cause_by_id) > 1:
        cause_by_id.pop("capacity", None)
    return tuple(cause_by_id.values())
