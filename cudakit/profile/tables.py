"""Sum the GPU work of a device by kernel, Python line, NVTX range, copy and stream, and waits by line."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from cudakit.profile.idle import (
    Gaps,
    IdleCause,
    IntervalSet,
    Ints,
    Mask,
    Times,
    intersection,
    union,
)
from cudakit.profile.result import (
    Copies,
    Grid,
    HostWait,
    Kernel,
    Line,
    Memsets,
    NamedRange,
    StreamWork,
)
from cudakit.profile.steps import OpenRanges, without_numbers
from cudakit.profile.timeline import Timeline, WorkKind
from cudakit.stacks import Frame, call_site_index
from cudakit.trace.kinds import LIBRARY_DOMAINS, Direction, EventKind, MemoryKind

# Kernel that adds the partial results of a GEMM that is split along K.
_SPLIT_K = re.compile(r"split_?k.*reduce|reduce.*split_?k", re.IGNORECASE)
_HOST_MEMORY = {
    MemoryKind.PAGEABLE: "pageable",
    MemoryKind.PINNED: "pinned",
    MemoryKind.MANAGED: "managed",
    MemoryKind.MANAGED_STATIC: "managed",
}


@dataclass(frozen=True, slots=True)
class WorkTable:
    """The work of one device in its measured time, as columns."""

    timeline: Timeline
    rows: Ints  # row numbers of the work in ``timeline.work``
    range_path: Ints  # index in ``ranges`` of the NVTX ranges of each row
    ranges: OpenRanges
    limits: DeviceLimits
    demangle: Callable[[str], str]
    start_ns: Times = field(init=False)
    end_ns: Times = field(init=False)
    duration_ns: Times = field(init=False)

    def __post_init__(self) -> None:
        work = self.timeline.work
        start, end = work.start_ns[self.rows], work.end_ns[self.rows]
        object.__setattr__(self, "start_ns", start)
        object.__setattr__(self, "end_ns", end)
        object.__setattr__(self, "duration_ns", end - start)

    @property
    def total_ns(self) -> int:
        """The summed time of all work."""
        return int(self.duration_ns.sum())

    def positions_of_kind(self, kind: WorkKind) -> Ints:
        """Return the positions in ``rows`` of one kind of work."""
        return np.flatnonzero(self.timeline.work.kind[self.rows] == kind)

    def field_values(self, positions: Ints, kind: EventKind, name: str) -> Ints:
        """Return a field of the records at these positions, which all have one kind."""
        rows = self.timeline.work.record[self.rows[positions]]
        result: Ints = self.timeline.activities.records_of(kind)[name][rows]
        return result

    def intervals(self, positions: Ints) -> IntervalSet:
        """Return the intervals in which work at these positions ran."""
        return union(self.start_ns[positions], self.end_ns[positions])

    def stack(self, positions: Ints) -> tuple[tuple[Frame, ...], int]:
        """Return the call stack that launched the most GPU time at these positions, and its call site."""
        sites = self.timeline.work.site[self.rows[positions]]
        distinct_sites, index = np.unique(sites, return_inverse=True)
        if not len(distinct_sites):
            return (), 0
        site = int(
            distinct_sites[np.argmax(np.bincount(index, weights=self.duration_ns[positions]))]
        )
        return stack_of(self.timeline, site)


def stack_of(timeline: Timeline, site: int) -> tuple[tuple[Frame, ...], int]:
    """Return a call stack as frames, and the index of its call site."""
    stack = timeline.stacks[site]
    return stack, call_site_index(stack)


def groups(row_keys: Ints) -> list[tuple[int, Ints]]:
    """Return each key with the positions that have this key."""
    if not len(row_keys):
        return []
    key_order = np.argsort(row_keys, kind="stable")
    sorted_keys = row_keys[key_order]
    group_begins = np.flatnonzero(np.concatenate([[True], sorted_keys[1:] != sorted_keys[:-1]]))
    position_groups = np.split(key_order, group_begins[1:])
    return list(zip(sorted_keys[group_begins].tolist(), position_groups, strict=True))


def _share(part_ns: int, total_ns: int) -> float:
    return part_ns / total_ns if total_ns else 0.0


# --- kernels ---------------------------------------------------------------------------------------


def kernels(table: WorkTable) -> tuple[Kernel, ...]:
    """Return the kernels, the one with the most time first."""
    positions = table.positions_of_kind(WorkKind.KERNEL)
    work = table.timeline.work
    begins_run = _begins_run(table)
    rows = [
        _kernel(table, name_index, positions[index], int(begins_run[positions[index]].sum()))
        for name_index, index in groups(work.name[table.rows[positions]])
    ]
    return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.name)))


def _kernel(table: WorkTable, name_index: int, positions: Ints, run_count: int) -> Kernel:
    durations = table.duration_ns[positions]
    total_ns = int(durations.sum())
    stack, site = table.stack(positions)
    sites = np.unique(table.timeline.work.site[table.rows[positions]])
    return Kernel(
        name=table.demangle(table.timeline.names[name_index]),
        calls=len(positions),
        total_ns=total_ns,
        mean_ns=total_ns // len(positions),
        median_ns=int(np.median(durations)),
        share=_share(total_ns, table.total_ns),
        stack=stack,
        site=site,
        sites=len(sites),
        blocks=int(np.median(blocks(table, positions))),
        consecutive=len(positions) / max(run_count, 1),
        grid=_grid(table, int(positions[np.argmax(durations)]))
        if table.limits.are_recorded
        else None,
    )


def _grid(table: WorkTable, position: int) -> Grid:
    """Return how the grid of one run of a kernel fills the device."""
    positions = np.array([position])
    grid_values = {
        name: table.field_values(positions, EventKind.KERNEL_RUN, name)[0]
        for name in ("block", "registers", "shared_bytes")
    }
    launch = LaunchConfiguration(
        blocks=int(blocks(table, positions)[0]),
        threads_per_block=math.prod(grid_values["block"].tolist()),
        registers_per_thread=int(grid_values["registers"]),
        shared_bytes_per_block=int(grid_values["shared_bytes"]),
    )
    return grid_fill(launch, table.limits)


def graph_kernels(table: WorkTable) -> int:
    """Return the number of kernels that CUDA graphs launched."""
    positions = table.positions_of_kind(WorkKind.KERNEL)
    return int((table.timeline.work.graph_node[table.rows[positions]] != 0).sum())


def memsets(table: WorkTable) -> Memsets | None:
    """Return the sums over all memsets; None if there is no memset."""
    positions = table.positions_of_kind(WorkKind.MEMSET)
    if not len(positions):
        return None
    size_bytes = int(table.timeline.work.size_bytes[table.rows[positions]].astype(object).sum())
    return Memsets(len(positions), size_bytes, int(table.duration_ns[positions].sum()))


def _begins_run(table: WorkTable) -> Mask:
    """Return a mask of the work whose predecessor in its stream is not a run of the same kernel."""
    work, names = table.timeline.work, table.timeline.names
    stream, name = work.stream[table.rows], work.name[table.rows]
    distinct_names, index = np.unique(name, return_inverse=True)
    # A GEMM that is split along K has a second kernel, which counts as a part of the GEMM.
    is_reduction = np.array(
        [bool(_SPLIT_K.search(names[name_index])) for name_index in distinct_names.tolist()], bool
    )
    begins_run = np.ones(len(name), bool)
    stream_order = np.argsort(stream, kind="stable")
    stream_order = stream_order[~is_reduction[index[stream_order]]]
    stream, name = stream[stream_order], name[stream_order]
    begins_run[stream_order[1:]] = (stream[1:] != stream[:-1]) | (name[1:] != name[:-1])
    return begins_run


def blocks(table: WorkTable, positions: Ints) -> Ints:
    """Return the number of thread blocks of kernels."""
    grid = table.field_values(positions, EventKind.KERNEL_RUN, "grid").astype(np.float64)
    result: Ints = grid.prod(axis=1)
    return result


# --- lines and ranges ------------------------------------------------------------------------------


def lines(table: WorkTable) -> tuple[Line, ...]:
    """Return the lines of the program, the one with the most own time first."""
    work = table.timeline.work
    own_ns_by_frame: defaultdict[Frame, int] = defaultdict(int)
    cumulative_ns_by_frame: defaultdict[Frame, int] = defaultdict(int)
    call_counts: defaultdict[Frame, int] = defaultdict(int)
    for site, positions in groups(work.site[table.rows]):
        stack = table.timeline.stacks[site]
        if not stack:
            continue
        time_ns = int(table.duration_ns[positions].sum())
        own_ns_by_frame[stack[call_site_index(stack)]] += time_ns
        for frame in set(stack[call_site_index(stack) :]):
            cumulative_ns_by_frame[frame] += time_ns
            call_counts[frame] += len(positions)
    rows = (
        Line(
            frame,
            own_ns_by_frame[frame],
            time_ns,
            call_counts[frame],
            _share(time_ns, table.total_ns),
        )
        for frame, time_ns in cumulative_ns_by_frame.items()
    )
    return tuple(
        sorted(rows, key=lambda row: (-row.own_ns, -row.cumulative_ns, row.frame.filename))
    )


def named_ranges(table: WorkTable) -> tuple[NamedRange, ...]:
    """Return the NVTX ranges of the program, the one with the most time first.

    Ranges whose names differ only in numbers are summed in one row.
    """
    strings = table.timeline.activities.strings
    ns_by_range: defaultdict[tuple[str, str], int] = defaultdict(int)
    work_counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    for path_number, positions in groups(table.range_path):
        range_keys = {
            (without_numbers(strings[range_key.name]), strings[range_key.domain])
            for range_key in table.ranges.paths[path_number]
            if strings[range_key.domain] not in LIBRARY_DOMAINS
        }
        for range_key in range_keys:
            ns_by_range[range_key] += int(table.duration_ns[positions].sum())
            work_counts[range_key] += len(positions)
    rows = (
        NamedRange(
            name, domain, work_counts[name, domain], total_ns, _share(total_ns, table.total_ns)
        )
        for (name, domain), total_ns in ns_by_range.items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.name)))


# --- copies and collectives ------------------------------------------------------------------------


def copies(table: WorkTable, kernel_time: IntervalSet) -> tuple[Copies, ...]:
    """Return the copies by direction and kind of host memory, those with the most time first."""
    positions = table.positions_of_kind(WorkKind.COPY)
    direction = table.field_values(positions, EventKind.COPY_RUN, "direction").astype(np.int64)
    host_memory = _host_memory(table, positions, direction)
    is_peer = table.field_values(positions, EventKind.COPY_RUN, "peer_device") >= 0
    rows = [
        _copies(table, positions[index], kernel_time)
        for _, index in groups(direction * 100 + host_memory * 10 + is_peer)
    ]
    return tuple(sorted(rows, key=lambda row: -row.total_ns))


def _host_memory(table: WorkTable, positions: Ints, direction: Ints) -> Ints:
    """Return the MemoryKind of each copy's host memory; of device memory for copies between devices."""
    source = table.field_values(positions, EventKind.COPY_RUN, "source_memory").astype(np.int64)
    destination_kind = table.field_values(
        positions, EventKind.COPY_RUN, "destination_memory"
    ).astype(np.int64)
    result: Ints = np.select(
        [direction == Direction.HOST_TO_DEVICE, direction == Direction.DEVICE_TO_HOST],
        [source, destination_kind],
        int(MemoryKind.DEVICE),
    )
    return result


def _copies(table: WorkTable, positions: Ints, kernel_time: IntervalSet) -> Copies:
    size_bytes = int(table.timeline.work.size_bytes[table.rows[positions]].astype(object).sum())
    total_ns = int(table.duration_ns[positions].sum())
    overlapped_ns = kernel_time.covered_within(table.start_ns[positions], table.end_ns[positions])
    direction = Direction(
        int(table.field_values(positions[:1], EventKind.COPY_RUN, "direction")[0])
    )
    host_memory = MemoryKind(int(_host_memory(table, positions[:1], np.array([direction]))[0]))
    is_peer = int(table.field_values(positions[:1], EventKind.COPY_RUN, "peer_device")[0]) >= 0
    uses_host = direction in (Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST)
    stack, site = table.stack(positions)
    return Copies(
        direction=direction,
        host=_HOST_MEMORY.get(host_memory, "unknown") if uses_host else "none",  # type: ignore[arg-type]
        peer=is_peer,
        calls=len(positions),
        size_bytes=size_bytes,
        total_ns=total_ns,
        bytes_per_s=size_bytes / total_ns * 1e9 if total_ns else None,
        overlapped_ns=int(overlapped_ns.sum()),
        stack=stack,
        site=site,
    )


def overlap(first_set: IntervalSet, second_set: IntervalSet) -> int:
    """Return the time in nanoseconds that two sets of intervals have in common."""
    return intersection(first_set, second_set).total_ns


# --- streams ---------------------------------------------------------------------------------------


def streams(table: WorkTable) -> tuple[StreamWork, ...]:
    """Return the streams, the one with the most time first."""
    work = table.timeline.work
    positions_by_stream = groups(work.stream[table.rows])
    intervals_by_stream = [table.intervals(positions) for _, positions in positions_by_stream]
    rows = [
        StreamWork(
            stream,
            len(positions),
            stream_intervals.total_ns,
            exclusive_ns,
            _small_kernel_time(table, positions),
        )
        for (stream, positions), stream_intervals, exclusive_ns in zip(
            positions_by_stream,
            intervals_by_stream,
            _exclusive_times(intervals_by_stream),
            strict=True,
        )
    ]
    return tuple(sorted(rows, key=lambda row: -row.busy_ns))


def _exclusive_times(interval_sets: Sequence[IntervalSet]) -> list[int]:
    """Return the time of each set of intervals in which no other set has an interval."""
    interval_counts = [len(intervals) for intervals in interval_sets]
    set_number = np.repeat(np.arange(len(interval_sets)), interval_counts)
    boundary_times = np.concatenate(
        [
            *(intervals.start_ns for intervals in interval_sets),
            *(intervals.end_ns for intervals in interval_sets),
        ]
    )
    time_order = np.argsort(boundary_times, kind="stable")
    boundary_times = boundary_times[time_order]
    open_set_count = np.cumsum(np.repeat([1, -1], sum(interval_counts))[time_order])
    # While only one set has an open interval, the sum of the numbers of open sets is the number of that set.
    open_set_numbers = np.cumsum(np.concatenate([set_number, -set_number])[time_order])
    is_alone = open_set_count[:-1] == 1
    exclusive_times = np.zeros(len(interval_sets), np.int64)
    np.add.at(exclusive_times, open_set_numbers[:-1][is_alone], np.diff(boundary_times)[is_alone])
    return [int(time) for time in exclusive_times]


def _small_kernel_time(table: WorkTable, positions: Ints) -> int:
    """Return the time of kernels that use at most half of the multiprocessors."""
    is_kernel = table.timeline.work.kind[table.rows[positions]] == WorkKind.KERNEL
    kernel_positions = positions[is_kernel]
    is_small = blocks(table, kernel_positions) * 2 <= table.limits.multiprocessors
    return int(table.duration_ns[kernel_positions[is_small]].sum())


# --- waits and allocations of the host -------------------------------------------------------------

_KINDS: dict[IdleCause, Literal["wait", "allocation"]] = {
    IdleCause.HOST_WAIT: "wait",
    IdleCause.ALLOCATION: "allocation",
}


def host_waits(
    timeline: Timeline,
    cause_of_call: Ints,
    gaps: Gaps,
    is_measured_on_host: Callable[[Times], Mask] | None,
    is_measured_on_device: Callable[[Times], Mask] | None,
) -> tuple[HostWait, ...]:
    """Return the calls that made the host wait, those with the most idle time first.

    ``is_measured_on_host`` and ``is_measured_on_device`` return whether times of calls and of gaps are in
    measured steps; the device runs later than the host. Without these functions, all times count.
    """
    calls = timeline.calls
    is_call_measured = np.ones(len(calls.start_ns), bool)
    if is_measured_on_host:
        is_call_measured = is_measured_on_host(calls.start_ns)
    is_gap_measured = np.ones(len(gaps.start_ns), bool)
    if is_measured_on_device:
        is_gap_measured = is_measured_on_device(gaps.start_ns)
    rows: list[HostWait] = []
    for cause, kind in _KINDS.items():
        call_rows = np.flatnonzero(is_call_measured & (cause_of_call == cause))
        idle_ns_by_site = _idle_by_site(gaps, is_gap_measured, cause)
        for site, index in groups(calls.site[call_rows]):
            rows_of_site = call_rows[index]
            stack, site_index = stack_of(timeline, site)
            rows.append(
                HostWait(
                    kind=kind,
                    function=_most_frequent_function(timeline, rows_of_site),
                    calls=len(rows_of_site),
                    blocked_ns=int(
                        (calls.end_ns[rows_of_site] - calls.start_ns[rows_of_site]).sum()
                    ),
                    idle_ns=idle_ns_by_site.get(site, 0),
                    stack=stack,
                    site=site_index,
                )
            )
    return tuple(sorted(rows, key=lambda row: (-row.idle_ns, -row.blocked_ns)))


def _idle_by_site(gaps: Gaps, is_gap_measured: Mask, cause: IdleCause) -> dict[int, int]:
    """Return the idle time of a cause by the call stack of the wait or allocation."""
    blocking = gaps.blocking
    rows = np.flatnonzero(is_gap_measured[blocking.gap] & (blocking.cause == cause))
    return {
        site: int(blocking.idle_ns[rows[index]].sum())
        for site, index in groups(blocking.site[rows])
    }


def _most_frequent_function(timeline: Timeline, rows: Ints) -> str:
    name_indices, call_counts = np.unique(timeline.calls.name[rows], return_counts=True)
    return timeline.names[int(name_indices[np.argmax(call_counts)])]


# --- how the grid of a kernel fills the device -----------------------------------------------------
#
# Source: the CUDA programming guide, "Hardware multithreading", and the occupancy calculator of the toolkit.
# Registers are allocated for whole warps in units of 256, and for groups of four warps; shared memory in
# units of 128 bytes, with the bytes that the driver reserves in each block.

_WARP_THREADS: Final = 32
_REGISTER_UNIT: Final = 256
_WARP_GROUP: Final = 4
_SHARED_UNIT_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The number of multiprocessors of a device, and the resources of each multiprocessor; 0 if unknown."""

    multiprocessors: int
    threads: int = 0
    blocks: int = 0
    registers: int = 0
    shared_bytes: int = 0
    reserved_shared_bytes: int = 0  # shared memory that the driver keeps in each block

    @property
    def are_recorded(self) -> bool:
        """Whether all numbers that the occupancy depends on were recorded."""
        return (
            min(self.multiprocessors, self.threads, self.blocks, self.registers, self.shared_bytes)
            > 0
        )


@dataclass(frozen=True, slots=True)
class LaunchConfiguration:
    """The launch configuration of a kernel."""

    blocks: int
    threads_per_block: int
    registers_per_thread: int
    shared_bytes_per_block: int


def blocks_per_multiprocessor(launch: LaunchConfiguration, limits: DeviceLimits) -> int:
    """Return how many blocks of a kernel fit on one multiprocessor; at least 1, because the kernel ran."""
    warps = max(math.ceil(launch.threads_per_block / _WARP_THREADS), 1)
    block_limits = [limits.blocks, limits.threads // (warps * _WARP_THREADS)]
    if launch.registers_per_thread:
        registers_per_warp = _round_up(launch.registers_per_thread * _WARP_THREADS, _REGISTER_UNIT)
        resident_warps = limits.registers // registers_per_warp // _WARP_GROUP * _WARP_GROUP
        block_limits.append(resident_warps // warps)
    shared_bytes = _round_up(launch.shared_bytes_per_block, _SHARED_UNIT_BYTES)
    if shared_bytes + limits.reserved_shared_bytes:
        block_limits.append(limits.shared_bytes // (shared_bytes + limits.reserved_shared_bytes))
    return max(min(block_limits), 1)


def grid_fill(launch: LaunchConfiguration, limits: DeviceLimits) -> Grid:
    """Return how the grid of a kernel fills a device whose limits are known.

    The device runs as many blocks at the same time as fit; this is one wave. If all blocks take the same
    time, multiprocessors without a block of the last wave are idle.
    """
    resident_blocks = blocks_per_multiprocessor(launch, limits)
    waves = launch.blocks / (resident_blocks * limits.multiprocessors)
    running_blocks = min(launch.blocks, resident_blocks * limits.multiprocessors)
    thread_slots = limits.multiprocessors * limits.threads
    return Grid(
        blocks=launch.blocks,
        threads_per_block=launch.threads_per_block,
        registers_per_thread=launch.registers_per_thread,
        shared_bytes_per_block=launch.shared_bytes_per_block,
        multiprocessors_share=min(launch.blocks / limits.multiprocessors, 1.0),
        threads_share=min(running_blocks * launch.threads_per_block / thread_slots, 1.0),
        waves=waves,
        tail_share=1 - waves / math.ceil(waves) if waves else 0.0,
    )


def _round_up(value: int, allocation_unit: int) -> int:
    return -(-value // allocation_unit) * allocation_unit
