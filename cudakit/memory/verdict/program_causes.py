"""Causes of a failed allocation in the program: the memory that it holds, and the growth of this memory.

Each function returns the evidence for one cause, or None.
"""

from __future__ import annotations

import numpy as np

from cudakit.memory.analyze.call_sites import StackTable, site_name
from cudakit.memory.analyze.leaks import growing_stacks
from cudakit.memory.analyze.loops import is_inner_call
from cudakit.memory.analyze.step_peaks import growth_between, is_growing, is_rising
from cudakit.memory.result import Cause, DiffRow
from cudakit.memory.snapshot import Ints, Mask
from cudakit.memory.verdict.failure import Failure
from cudakit.stacks import Frame
from cudakit.units import format_bytes, format_count

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
    growing = growing_stacks(failure.trace_replay.allocations, failure.steps.bounds, failure.event)
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
    most_grown_index = int(grown_bytes.argmax())
    step_count = int(growing.steps[-1] - growing.steps[0]) + 1
    block_count = int((growing.counts_at_end - growing.counts[:, 0])[is_accumulating].sum())
    return Cause(
        "retained",
        total_bytes,
        sufficient=total_bytes >= failure.request.short_bytes,
        sentence=(
            f"{format_bytes(total_bytes)} in {format_count(block_count)} blocks accumulated over"
            f" {format_count(step_count)} steps and was not freed, most of it allocated at"
            f" {_site_text(failure.stacks, int(stack_ids[most_grown_index]))}"
        ),
        remedy=(
            "delete the references to earlier steps (in lists, losses with their graphs, caught exceptions):"
            " detach the tensors that you keep, or keep numbers instead"
        ),
        stack=failure.stacks.frames(int(stack_ids[most_grown_index])),
        site=failure.stacks.site_index(int(stack_ids[most_grown_index])),
    )


def growth(failure: Failure) -> Cause | None:
    """Return evidence that the peaks of the steps rise because requests get larger."""
    peaks = np.append(failure.earlier_peaks, failure.needed_bytes)
    if not is_rising(peaks):
        return None
    earlier_moment = failure.steps.peak_moment(len(peaks) // 4)
    growth_rows = growth_between(
        failure.stacks, failure.trace_replay.allocations, earlier_moment, failure.event
    )
    larger_rows = [
        (_larger_bytes(row), row) for row in growth_rows if row.before_count and row.after_count
    ]
    growth_by_size = sum(larger_bytes for larger_bytes, _ in larger_rows)
    growth_by_count = sum(
        (row.after_count - row.before_count) * row.before_bytes // row.before_count
        for _, row in larger_rows
        if row.after_count > row.before_count
    )
    if growth_by_size < max(growth_by_count, _MIN_CAUSE_SHARE * failure.needed_bytes):
        return None
    _, row = max(larger_rows, key=lambda pair: pair[0])
    growth_bytes = int(peaks[-1] - peaks[0])
    return Cause(
        "growth",
        growth_bytes,
        sufficient=growth_bytes >= failure.request.short_bytes,
        sentence=(
            f"the peak of each step rose from {format_bytes(int(peaks[0]))} to"
            f" {format_bytes(int(peaks[-1]))} (including the failed request) over"
            f" {format_count(len(peaks))} steps, because requests get larger, mainly at"
            f" {_frames_text(row.stack, row.site)}"
        ),
        remedy=(
            f"limit the size that grows at {_frames_text(row.stack, row.site)}: the length of sequences, the"
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
    growth_rows = growth_between(
        failure.stacks, failure.trace_replay.allocations, earlier_moment, failure.event
    )
    stack, site = failure.stacks.frames(failure.stack), failure.stacks.site_index(failure.stack)
    if growth_rows and growth_rows[0].change_bytes > failure.request.size_bytes:
        stack, site = growth_rows[0].stack, growth_rows[0].site
    return Cause(
        "one_off_peak",
        excess_bytes,
        sufficient=excess_bytes >= failure.request.short_bytes,
        sentence=(
            f"this step needs at least {format_bytes(failure.needed_bytes)}, and the {len(earlier_peaks):,}"
            f" {'step' if len(earlier_peaks) == 1 else 'steps'} before it needed at most"
            f" {format_bytes(highest_earlier_peak)}; most of the difference is from"
            f" {_frames_text(stack, site)}"
        ),
        remedy="do this phase in smaller parts: a smaller batch, chunks, or without gradients",
        stack=stack,
        site=site,
    )


def accumulated_blocks(failure: Failure) -> Cause | None:
    """Return evidence that a call site accumulates blocks until the failure, in a trace without steps."""
    allocations, failure_event = failure.trace_replay.allocations, failure.event
    if len(failure.steps):
        return None
    is_in_trace = (allocations.begin >= 0) & (allocations.begin < failure_event)
    n_stacks = len(failure.stacks.snapshot.stacks)
    is_live = is_in_trace & (allocations.end >= failure_event)
    live_counts = np.bincount(allocations.stack[is_live], minlength=n_stacks)
    is_never_freed = live_counts == np.bincount(allocations.stack[is_in_trace], minlength=n_stacks)
    live_bytes = np.bincount(
        allocations.stack[is_live], weights=allocations.size[is_live], minlength=n_stacks
    )
    candidate_stacks = np.flatnonzero(is_never_freed & (live_counts >= _MIN_ACCUMULATED_BLOCKS))
    # Layers keep their activations until the backward pass; stack 0 is empty.
    is_expected = _calls_any(failure.stacks, candidate_stacks, _STATE_CALLS | {"_call_impl"})
    is_expected |= candidate_stacks == 0
    live_bytes[np.setdiff1d(np.arange(n_stacks), candidate_stacks[~is_expected])] = 0
    stack_index = int(live_bytes.argmax())
    latest_event = allocations.begin[is_live & (allocations.stack == stack_index)].max(initial=0)
    if (
        live_bytes[stack_index] < 0.25 * failure.request.active_bytes
        or not live_bytes[stack_index]
        or latest_event < 0.75 * failure_event
    ):
        return None
    total_bytes = int(live_bytes[stack_index])
    return Cause(
        "retained",
        total_bytes,
        sufficient=total_bytes >= failure.request.short_bytes,
        sentence=(
            f"{format_bytes(total_bytes)} in {int(live_counts[stack_index]):,} blocks accumulated at"
            f" {_site_text(failure.stacks, stack_index)}, and none was freed"
        ),
        remedy="free these blocks earlier, or keep them in host memory",
        stack=failure.stacks.frames(stack_index),
        site=failure.stacks.site_index(stack_index),
    )


def first_phase(failure: Failure) -> Cause | None:
    """Return evidence that a statement failed in its first run, after other statements allocated memory."""
    if len(failure.earlier_peaks) or not failure.stack:
        return None
    live_allocations = failure.layout.allocation
    allocations, snapshot = failure.trace_replay.allocations, failure.stacks.snapshot
    bytes_by_stack = np.bincount(
        allocations.stack[live_allocations],
        weights=allocations.size[live_allocations],
        minlength=len(snapshot.stacks),
    )
    # Frames of each call stack, outermost first. Stack 0 is empty: the statements of its blocks are unknown.
    outer_first_stacks = {
        stack_index: snapshot.stacks[stack_index][::-1]
        for stack_index in np.flatnonzero(bytes_by_stack).tolist()
        if stack_index
    }
    bytes_with_stack = sum(int(bytes_by_stack[stack_index]) for stack_index in outer_first_stacks)
    min_phase_bytes = _MIN_PHASE_SHARE * failure.needed_bytes
    for depth, frame_index in enumerate(snapshot.stacks[failure.stack][::-1]):
        outer_first_stacks = {
            stack_index: frame_ids
            for stack_index, frame_ids in outer_first_stacks.items()
            if depth < len(frame_ids) and frame_ids[depth] == frame_index
        }
        if is_inner_call(snapshot.frames[frame_index]):
            return None  # the layers of a network are not phases of the program
        bytes_in_phase = sum(int(bytes_by_stack[stack_index]) for stack_index in outer_first_stacks)
        bytes_before = bytes_with_stack - bytes_in_phase
        if bytes_before >= min_phase_bytes:
            return _phase_cause(
                failure, frame_index, bytes_in_phase + failure.request.size_bytes, bytes_before
            )
    return None


def _phase_cause(
    failure: Failure, frame_index: int, needed_bytes: int, bytes_before: int
) -> Cause | None:
    if needed_bytes < _MIN_PHASE_SHARE * failure.needed_bytes:
        return None
    return Cause(
        "one_off_peak",
        needed_bytes,
        sufficient=needed_bytes >= failure.request.short_bytes,
        sentence=(
            f"{site_name(failure.stacks.snapshot.frames[frame_index])} needs at least"
            f" {format_bytes(needed_bytes)} more than the {format_bytes(bytes_before)}"
            " that was in use before it"
        ),
        remedy="let this phase need less: smaller parts, or less precise data; or free memory before it",
        stack=failure.stacks.frames(failure.stack),
        site=failure.stacks.site_index(failure.stack),
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
    return np.array(
        [
            any(
                frames[frame].name in function_names and "torch/" in frames[frame].filename
                for frame in stacks.snapshot.stacks[stack]
            )
            for stack in stack_ids.tolist()
        ],
        np.bool_,
    )


def _free_in_private_pools(failure: Failure, stack_ids: Ints) -> int:
    """Return the free bytes of the private pools that hold blocks of these call stacks.

    The pool of a CUDA graph is released with the graph, which lives as long as the blocks.
    """
    layout = failure.layout
    is_of_stacks = np.isin(failure.trace_replay.allocations.stack[layout.allocation], stack_ids)
    pool_ids = np.unique(layout.segments.pool[layout.block_segment[is_of_stacks]])
    is_freed_with_blocks = np.isin(
        layout.segments.pool[layout.free_block_segment], pool_ids[pool_ids != 0]
    )
    return int(layout.free_block_size[is_freed_with_blocks].sum())


def _larger_bytes(row: DiffRow) -> int:
    """Return the growth in bytes that larger blocks cause, without the growth by more blocks."""
    return row.after_bytes - row.after_count * row.before_bytes // row.before_count


def _site_text(stacks: StackTable, stack_index: int) -> str:
    return _frames_text(stacks.frames(stack_index), stacks.site_index(stack_index))


def _frames_text(frames: tuple[Frame, ...], site: int) -> str:
    return site_name(frames[site]) if frames else "a call site that was not recorded"
