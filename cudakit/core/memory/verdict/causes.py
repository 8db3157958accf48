"""The causes of a failed allocation: a function for each, which returns the evidence or None.

The ids and their meaning are in docs/explanation/memviz.md, the order in ``CAUSES``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from cudakit.core.memory.analyze.call_sites import StackTable, site_name
from cudakit.core.memory.analyze.leaks import growing_stacks
from cudakit.core.memory.analyze.loops import is_inner_call
from cudakit.core.memory.analyze.step_peaks import growth_between, is_growing, is_rising
from cudakit.core.memory.result import Cause, DiffRow
from cudakit.core.memory.snapshot import Ints, Mask
from cudakit.core.memory.verdict.failure import Failure
from cudakit.document import Frame
from cudakit.torch_rules.oom_verdict import verdict_of
from cudakit.torch_rules.sizes import MIB
from cudakit.units import format_bytes, format_count

# A cause below this share of the memory in use is noise.
_MIN_SHARE = 0.02
# Free memory below this share of the reserved memory is normal for the caching allocator.
LARGE_FREE_SHARE = 0.1
# A phase counts as an exception if it needs this much more than the highest step before it.
_MIN_EXCESS = 0.15
# A CUDA context with its libraries takes less than the larger of these: bytes, and share of the device.
_CONTEXT_BYTES, _CONTEXT_SHARE = 1536 * MIB, 0.04
# Fewer blocks of one call site do not show that the site accumulates blocks.
_MIN_ACCUMULATED = 8


def request_too_large(failure: Failure) -> Cause | None:
    """The request alone is larger than all memory that the process could have."""
    size, available = failure.request.size, failure.available
    if size <= available:
        return None
    of_device = "the device has" if failure.device_total else "this process could have had at most"
    return Cause(
        "request_too_large",
        size - available,
        sufficient=True,
        sentence=f"the request alone is {format_bytes(size)}, and {of_device} {format_bytes(available)}",
        remedy="compute this result in parts, or with less precision",
        stack=failure.stacks.frames(failure.stack),
        site=failure.stacks.site(failure.stack),
    )


# --- what the program holds -----------------------------------------------------------------------


def retained(failure: Failure) -> Cause | None:
    """Blocks of some call sites accumulate from step to step."""
    growing = growing_stacks(failure.replayed.allocations, failure.steps.bounds, failure.event)
    if not len(growing.ids):
        return None
    added_blocks = growing.counts[:, -1] - growing.counts[:, 0]
    accumulates = (added_blocks >= 2) & is_growing(growing.counts)
    accumulates &= ~_calls_any(failure.stacks, growing.ids, _STATE_CALLS)
    ids = growing.ids[accumulates]
    grown = (growing.at_end - growing.held[:, 0])[accumulates]
    total = int(grown.sum()) + _free_in_private_pools(failure, ids)
    if total < _MIN_SHARE * failure.request.active or not len(ids):
        return None
    largest = int(grown.argmax())
    n_steps = int(growing.steps[-1] - growing.steps[0])
    blocks = int(added_blocks[accumulates].sum())
    return Cause(
        "retained",
        total,
        sufficient=total >= failure.request.short,
        sentence=(
            f"{format_bytes(total)} in {format_count(blocks)} blocks accumulated over"
            f" {format_count(n_steps)} steps and was not freed, most of it allocated at"
            f" {_site_text(failure.stacks, int(ids[largest]))}"
        ),
        remedy=(
            "delete the references to earlier steps: detach what is kept, or keep numbers instead of"
            " tensors (lists, losses with their graphs, caught exceptions)"
        ),
        stack=failure.stacks.frames(int(ids[largest])),
        site=failure.stacks.site(int(ids[largest])),
    )


def growth(failure: Failure) -> Cause | None:
    """The peaks of the steps rise because requests get larger."""
    peaks = np.append(failure.earlier_peaks, failure.needed)
    if not is_rising(peaks):
        return None
    early = len(peaks) // 4
    before = failure.steps.peak_moment(early)
    rows = growth_between(failure.stacks, failure.replayed.allocations, before, failure.event)
    larger = [(_larger_bytes(row), row) for row in rows if row.before_count and row.after_count]
    by_size = sum(size for size, _ in larger)
    by_count = sum(
        (row.after_count - row.before_count) * row.before_bytes // row.before_count
        for _, row in larger
        if row.after_count > row.before_count
    )
    if by_size < max(by_count, _MIN_SHARE * failure.needed):
        return None
    _, row = max(larger, key=lambda pair: pair[0])
    grown = int(peaks[-1] - peaks[0])
    return Cause(
        "growth",
        grown,
        sufficient=grown >= failure.request.short,
        sentence=(
            f"the peak of each step rose from {format_bytes(int(peaks[0]))} to"
            f" {format_bytes(int(peaks[-1]))} (with the failed request) over"
            f" {format_count(len(peaks))} steps, because requests get larger, most at"
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
    """The failing step needs much more than every step before it."""
    earlier = failure.earlier_peaks
    if not len(earlier):
        return None
    usual = int(earlier.max())
    excess = failure.needed - usual
    if excess < _MIN_EXCESS * usual or excess < _MIN_SHARE * failure.request.active:
        return None
    before = failure.steps.peak_moment(int(earlier.argmax()))
    rows = growth_between(failure.stacks, failure.replayed.allocations, before, failure.event)
    stack, site = failure.stacks.frames(failure.stack), failure.stacks.site(failure.stack)
    if rows and rows[0].change_bytes > failure.request.size:
        stack, site = rows[0].stack, rows[0].site
    return Cause(
        "one_off_peak",
        excess,
        sufficient=excess >= failure.request.short,
        sentence=(
            f"this step needs at least {format_bytes(failure.needed)}, and the {len(earlier):,}"
            f" {'step' if len(earlier) == 1 else 'steps'} before it needed at most"
            f" {format_bytes(usual)}; most of the difference is from {_frames_text(stack, site)}"
        ),
        remedy="do this phase in smaller parts: a smaller batch, chunks, or without gradients",
        stack=stack,
        site=site,
    )


def accumulated_blocks(failure: Failure) -> Cause | None:
    """One call site allocates block after block until the failure, and none is freed; there are no steps."""
    allocations, event = failure.replayed.allocations, failure.event
    if len(failure.steps):
        return None
    born = (allocations.begin >= 0) & (allocations.begin < event)
    n = len(failure.stacks.snapshot.stacks)
    live = born & (allocations.end >= event)
    count = np.bincount(allocations.stack[live], minlength=n)
    never_freed = count == np.bincount(allocations.stack[born], minlength=n)
    held = np.bincount(allocations.stack[live], weights=allocations.size[live], minlength=n)
    candidates = np.flatnonzero(never_freed & (count >= _MIN_ACCUMULATED))
    # Layers keep their activations until the backward pass; stack 0 is empty.
    expected = _calls_any(failure.stacks, candidates, _STATE_CALLS | {"_call_impl"})
    expected |= candidates == 0
    held[np.setdiff1d(np.arange(n), candidates[~expected])] = 0
    stack = int(held.argmax())
    latest = allocations.begin[live & (allocations.stack == stack)].max(initial=0)
    if held[stack] < 0.25 * failure.request.active or not held[stack] or latest < 0.75 * event:
        return None
    total = int(held[stack])
    return Cause(
        "retained",
        total,
        sufficient=total >= failure.request.short,
        sentence=(
            f"{format_bytes(total)} in {int(count[stack]):,} blocks accumulated at"
            f" {_site_text(failure.stacks, stack)}, and none was freed"
        ),
        remedy="free these blocks earlier, or keep them in host memory",
        stack=failure.stacks.frames(stack),
        site=failure.stacks.site(stack),
    )


def first_phase(failure: Failure) -> Cause | None:
    """The failing statement runs for the first time, after other statements allocated their memory."""
    if len(failure.earlier_peaks) or not failure.stack:
        return None
    live = failure.layout.allocation
    allocations, snapshot = failure.replayed.allocations, failure.stacks.snapshot
    size = np.bincount(
        allocations.stack[live], weights=allocations.size[live], minlength=len(snapshot.stacks)
    )
    # Outermost frame first. Stack 0 is empty: the statement of these blocks is unknown.
    paths = {
        stack: snapshot.stacks[stack][::-1] for stack in np.flatnonzero(size).tolist() if stack
    }
    with_stack = sum(int(size[stack]) for stack in paths)
    smallest = LARGE_FREE_SHARE * failure.needed
    for depth, frame in enumerate(snapshot.stacks[failure.stack][::-1]):
        paths = {
            stack: path
            for stack, path in paths.items()
            if depth < len(path) and path[depth] == frame
        }
        if is_inner_call(snapshot.frames[frame]):
            return None  # the layers of a network are not phases of the program
        in_phase = sum(int(size[stack]) for stack in paths)
        before = with_stack - in_phase
        if before >= smallest:
            return _phase_cause(failure, frame, in_phase + failure.request.size, before)
    return None


def _phase_cause(failure: Failure, frame: int, needed: int, before: int) -> Cause | None:
    if needed < LARGE_FREE_SHARE * failure.needed:
        return None
    return Cause(
        "one_off_peak",
        needed,
        sufficient=needed >= failure.request.short,
        sentence=(
            f"{site_name(failure.stacks.snapshot.frames[frame])} needs at least {format_bytes(needed)} more"
            f" than the {format_bytes(before)} that was in use before it"
        ),
        remedy="let this phase need less: smaller parts, or less precise data; or free memory before it",
        stack=failure.stacks.frames(failure.stack),
        site=failure.stacks.site(failure.stack),
    )


def capacity(failure: Failure) -> Cause | None:
    """The memory in use is what the program needs."""
    request = failure.request
    return Cause(
        "capacity",
        request.short,
        sufficient=True,
        sentence=(
            f"the program needs this memory: {format_bytes(request.active)} was in use,"
            f" {format_bytes(request.free)} was free in segments and {format_bytes(request.device_free)} on"
            f" the device, {format_bytes(request.short)} less than needed; no growth from step to step and no"
            " single phase explains it"
        ),
        remedy=(
            f"use at least {format_bytes(max(request.short, 0))} less at this moment: a smaller batch,"
            " activation checkpointing, or less in the largest call sites (--at oom lists them)"
        ),
    )


# --- what others hold -----------------------------------------------------------------------------


def process_limit(failure: Failure) -> Cause | None:
    """The device had enough free memory, but a limit of this process refused the request."""
    request = failure.request
    if not request.limited:
        return None
    limit = ""
    if failure.memory_fraction is not None:
        limit = f" of {failure.memory_fraction:.3g} of the device"
    return Cause(
        "process_limit",
        request.device_free,
        sufficient=True,
        sentence=(
            f"a limit{limit} of this process refused a new segment of {format_bytes(request.needed)}:"
            f" {format_bytes(request.reserved)} was reserved, and {format_bytes(request.device_free)} of"
            " the device was free"
        ),
        remedy=_raise_limit(failure),
    )


def _raise_limit(failure: Failure) -> str:
    """Return advice in the unit of the call: a fraction of the device, or a factor of the fraction."""
    request = failure.request
    needed = request.reserved + request.needed
    # The limit is unknown without a recorded fraction; it allowed the most that was reserved.
    allowed = max(int(failure.replayed.curves.reserved[: failure.event + 1].max()), 1)
    if failure.device_total:
        fraction = min(-(-1000 * needed // failure.device_total) / 1000, 1.0)
        amount = f"to a fraction of at least {fraction:.3f} ({format_bytes(needed)} of the device)"
    else:
        factor = max(-(-100 * needed // allowed) / 100, 1.01)
        amount = (
            f"to at least {factor:.2f} times the present fraction ({format_bytes(needed)}; the most that"
            f" was reserved before is {format_bytes(allowed)})"
        )
    return f"raise the limit {amount}: {request.calls.set_limit}"


def other_processes(failure: Failure) -> Cause | None:
    """Other processes or libraries hold the memory that is missing."""
    request, outside = failure.request, failure.outside
    if request.limited or outside < max(_CONTEXT_BYTES, _CONTEXT_SHARE * failure.available):
        return None
    return Cause(
        "other_processes",
        outside,
        sufficient=outside + request.device_free >= request.needed,
        sentence=(
            f"{format_bytes(outside)} of the device is in use outside this allocator{_libraries(failure)};"
            f" {format_bytes(request.reserved)} is reserved here and"
            f" {format_bytes(request.device_free)} is free"
        ),
        remedy=(
            "free that memory: `cudakit devices` lists the processes, and `cudakit run --memory` the"
            " allocations of other libraries"
        ),
    )


def _libraries(failure: Failure) -> str:
    """Return which libraries of this process hold memory outside the allocator, as the end of a clause."""
    if not failure.libraries:
        return ", by other processes or other libraries of this process"
    names = ", ".join(f"{format_bytes(size)} by {name}" for name, size in failure.libraries)
    return f" ({names}, in this process)"


# --- free memory that the request cannot use ------------------------------------------------------

_UNUSABLE_REMEDIES: Final = {
    "pool": "allocate on the stream that has the free memory, let CUDA graphs share one pool, and delete"
    " graphs and MemPools that are no longer used",
    "fragmentation": "free the long-lived blocks that keep segments in use, or allocate them first"
    " (section Fragmentation)",
}


def fragmentation(failure: Failure) -> Cause | None:
    """Memory is free in segments, but the request cannot use it."""
    request, verdict = failure.request, verdict_of(failure.request)
    unusable = request.free + (request.pending if verdict.code == "pending" else 0)
    sufficient = verdict.code not in ("limit", "capacity")
    if not unusable or not (sufficient or unusable >= LARGE_FREE_SHARE * request.reserved):
        return None
    reason = verdict.reason
    if not sufficient:
        reason = (
            f"{format_bytes(request.free)} is free in segments, which is less than the request, and the"
            f" largest free block is {format_bytes(max(request.own_largest, request.other_largest))}"
        )
    remedy = verdict.remedy or _UNUSABLE_REMEDIES.get(
        verdict.code, _UNUSABLE_REMEDIES["fragmentation"]
    )
    return Cause("fragmentation", unusable, sufficient=sufficient, sentence=reason, remedy=remedy)


CauseFunction = Callable[[Failure], Cause | None]
# The deepest cause first. The last three have weak evidence.
CAUSES: Final[tuple[CauseFunction, ...]] = (
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
_COMPARED_WITH_FREE: Final = (retained, growth, one_off_peak)


# These need the history before the failure, and take longer.
_OF_HISTORY: Final = (retained, growth, one_off_peak, accumulated_blocks, first_phase)


def causes_of(failure: Failure, *, with_history: bool) -> tuple[Cause, ...]:
    """Return the causes of a failed allocation, the deepest first; there is at least one.

    Without ``with_history``, only those that the memory at the failure shows.
    """
    functions = [function for function in CAUSES if with_history or function not in _OF_HISTORY]
    found = {function: cause for function in functions if (cause := function(failure)) is not None}
    if growth in found:
        found.pop(one_off_peak, None)
    unusable = found.get(fragmentation)
    is_main = (
        unusable is not None
        and unusable.sufficient
        and unusable.bytes >= LARGE_FREE_SHARE * failure.request.reserved
        and all(
            unusable.bytes > cause.bytes
            for function, cause in found.items()
            if function in _COMPARED_WITH_FREE
        )
    )
    order = [unusable] if is_main and unusable is not None else []
    order += sorted(found.values(), key=lambda cause: not cause.sufficient)
    distinct: dict[str, Cause] = {}
    for cause in order:
        distinct.setdefault(cause.id, cause)
    if len(distinct) > 1:
        distinct.pop("capacity", None)
    return tuple(distinct.values())


# --- call sites -----------------------------------------------------------------------------------

# Functions that allocate parameters of a network or the state of an optimizer, which stay in use.
_STATE_CALLS = frozenset({"_init_group", "_apply", "load_state_dict", "_load_from_state_dict"})


def _calls_any(stacks: StackTable, ids: Ints, names: frozenset[str]) -> Mask:
    """Return which call stacks contain one of these functions of PyTorch."""
    frames = stacks.snapshot.frames
    return np.array(
        [
            any(
                frames[frame].name in names and "torch/" in frames[frame].filename
                for frame in stacks.snapshot.stacks[stack]
            )
            for stack in ids.tolist()
        ],
        np.bool_,
    )


def _free_in_private_pools(failure: Failure, ids: Ints) -> int:
    """Return the free bytes of the private pools that hold blocks of these call stacks.

    The pool of a CUDA graph is released with the graph, which lives as long as the blocks.
    """
    layout = failure.layout
    in_stacks = np.isin(failure.replayed.allocations.stack[layout.allocation], ids)
    pools = np.unique(layout.segments.pool[layout.block_segment[in_stacks]])
    is_freed_with_blocks = np.isin(layout.segments.pool[layout.free_segment], pools[pools != 0])
    return int(layout.free_size[is_freed_with_blocks].sum())


def _larger_bytes(row: DiffRow) -> int:
    """Return the bytes by which the later blocks are larger than as many earlier ones."""
    return row.after_bytes - row.after_count * row.before_bytes // row.before_count


def _site_text(stacks: StackTable, stack: int) -> str:
    return _frames_text(stacks.frames(stack), stacks.site(stack))


def _frames_text(frames: tuple[Frame, ...], site: int) -> str:
    return site_name(frames[site]) if frames else "a call site that was not recorded"
