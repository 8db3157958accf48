"""Sum the GPU work of a device by kernel, Python line, NVTX range, copy and stream, and waits by line."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from cudakit.profile.idle import Gaps, IdleCause, IntervalSet, union
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
from cudakit.profile.steps import RangePath, without_numbers
from cudakit.profile.timeline import Column, GpuWork, Timeline, WorkKind
from cudakit.stacks import Frame, call_site_index
from cudakit.trace.kinds import LIBRARY_DOMAINS, Direction, EventKind, MemoryKind

# Kernel that adds the partial results of a GEMM that is split along K.
_SPLIT_K = re.compile(r"split_?k.*reduce|reduce.*split_?k", re.IGNORECASE)
_HOST_MEMORY: dict[int, Literal["pageable", "pinned", "managed"]] = {
    MemoryKind.PAGEABLE: "pageable",
    MemoryKind.PINNED: "pinned",
    MemoryKind.MANAGED: "managed",
    MemoryKind.MANAGED_STATIC: "managed",
}


@dataclass(frozen=True, slots=True)
class WorkTable:
    """The work of one device in its measured time, as columns."""

    timeline: Timeline
    work: GpuWork
    duration_ns: Column
    range_path: Column  # index in ``ranges`` of the NVTX ranges of each row
    ranges: Sequence[RangePath]
    limits: DeviceLimits
    demangle: Callable[[str], str]

    @property
    def total_ns(self) -> int:
        """The summed time of all work."""
        return int(self.duration_ns.sum())

    def share(self, time_ns: int) -> float:
        """Return a time as a share of the summed time of all work."""
        total_ns = self.total_ns
        return time_ns / total_ns if total_ns else 0.0

    def rows_of_kind(self, kind: WorkKind) -> Column:
        """Return the rows of one kind of work."""
        return np.flatnonzero(self.work.kind == kind)

    def field_values(self, rows: Column, kind: EventKind, name: str) -> Column:
        """Return a field of the records of these rows, which all have one kind."""
        records = self.timeline.activities.records[kind]
        result: Column = records[name][self.work.record[rows]]
        return result

    def intervals(self, rows: Column) -> IntervalSet:
        """Return the intervals in which work of these rows ran."""
        return union(self.work.start_ns[rows], self.work.end_ns[rows])

    def stack(self, rows: Column) -> tuple[tuple[Frame, ...], int]:
        """Return the call stack that launched the most GPU time of these rows, and its call site."""
        sites, index = np.unique(self.work.site[rows], return_inverse=True)
        if not len(sites):
            return (), 0
        times = np.bincount(index, weights=self.duration_ns[rows])
        stack = self.timeline.stacks[int(sites[np.argmax(times)])]
        return stack, call_site_index(stack)


def groups(keys: Column) -> list[tuple[int, Column]]:
    """Return each key with the positions that have this key."""
    if not len(keys):
        return []
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    begins = np.flatnonzero(np.concatenate([[True], sorted_keys[1:] != sorted_keys[:-1]]))
    return list(zip(sorted_keys[begins].tolist(), np.split(order, begins[1:]), strict=True))


# --- kernels ---------------------------------------------------------------------------------------


def kernels(table: WorkTable) -> tuple[Kernel, ...]:
    """Return the kernels, the one with the most time first."""
    kernel_rows = table.rows_of_kind(WorkKind.KERNEL)
    begins_run = _begins_run(table)
    result = []
    for name, index in groups(table.work.name[kernel_rows]):
        rows = kernel_rows[index]
        durations = table.duration_ns[rows]
        total_ns = int(durations.sum())
        stack, site = table.stack(rows)
        longest = rows[[np.argmax(durations)]]
        result.append(
            Kernel(
                name=table.demangle(table.timeline.names[name]),
                calls=len(rows),
                total_ns=total_ns,
                mean_ns=total_ns // len(rows),
                median_ns=int(np.median(durations)),
                share=table.share(total_ns),
                stack=stack,
                site=site,
                sites=len(np.unique(table.work.site[rows])),
                blocks=int(np.median(_blocks(table, rows))),
                consecutive=len(rows) / max(int(begins_run[rows].sum()), 1),
                grid=_grid(table, longest) if table.limits.are_recorded else None,
            )
        )
    return tuple(sorted(result, key=lambda kernel: (-kernel.total_ns, kernel.name)))


def _begins_run(table: WorkTable) -> Column:
    """Return a mask of the work whose predecessor in its stream is not a run of the same kernel."""
    stream, name = table.work.stream, table.work.name
    distinct_names, index = np.unique(name, return_inverse=True)
    # A GEMM that is split along K has a second kernel, which counts as a part of the GEMM.
    is_reduction = np.array(
        [bool(_SPLIT_K.search(table.timeline.names[name])) for name in distinct_names.tolist()],
        bool,
    )
    begins_run = np.ones(len(name), bool)
    order = np.argsort(stream, kind="stable")
    order = order[~is_reduction[index[order]]]
    stream, name = stream[order], name[order]
    begins_run[order[1:]] = (stream[1:] != stream[:-1]) | (name[1:] != name[:-1])
    return begins_run


def _blocks(table: WorkTable, rows: Column) -> Column:
    """Return the number of thread blocks of kernels."""
    grid = table.field_values(rows, EventKind.KERNEL_RUN, "grid").astype(np.float64)
    result: Column = grid.prod(axis=1)
    return result


def _grid(table: WorkTable, row: Column) -> Grid:
    """Return how the grid of one run of a kernel fills the device."""
    block, registers, shared_bytes = (
        table.field_values(row, EventKind.KERNEL_RUN, name)[0]
        for name in ("block", "registers", "shared_bytes")
    )
    return grid_fill(
        table.limits,
        blocks=int(_blocks(table, row)[0]),
        threads=math.prod(block.tolist()),
        registers=int(registers),
        shared_bytes=int(shared_bytes),
    )


def graph_kernels(table: WorkTable) -> int:
    """Return the number of kernels that CUDA graphs launched."""
    return int((table.work.graph_node[table.rows_of_kind(WorkKind.KERNEL)] != 0).sum())


def memsets(table: WorkTable) -> Memsets | None:
    """Return the sums over all memsets; None if there is no memset."""
    rows = table.rows_of_kind(WorkKind.MEMSET)
    if not len(rows):
        return None
    size_bytes = int(table.work.size_bytes[rows].astype(object).sum())
    return Memsets(len(rows), size_bytes, int(table.duration_ns[rows].sum()))


# --- lines and ranges ------------------------------------------------------------------------------


def lines(table: WorkTable) -> tuple[Line, ...]:
    """Return the lines of the program, the one with the most own time first."""
    own_ns: defaultdict[Frame, int] = defaultdict(int)
    cumulative_ns: defaultdict[Frame, int] = defaultdict(int)
    calls: defaultdict[Frame, int] = defaultdict(int)
    for site, rows in groups(table.work.site):
        stack = table.timeline.stacks[site]
        if not stack:
            continue
        time_ns = int(table.duration_ns[rows].sum())
        callers = stack[call_site_index(stack) :]
        own_ns[callers[0]] += time_ns
        for frame in set(callers):
            cumulative_ns[frame] += time_ns
            calls[frame] += len(rows)
    result = (
        Line(frame, own_ns[frame], time_ns, calls[frame], table.share(time_ns))
        for frame, time_ns in cumulative_ns.items()
    )
    return tuple(
        sorted(result, key=lambda line: (-line.own_ns, -line.cumulative_ns, line.frame.filename))
    )


def named_ranges(table: WorkTable) -> tuple[NamedRange, ...]:
    """Return the NVTX ranges of the program, the one with the most time first.

    Ranges whose names differ only in numbers are summed in one row.
    """
    strings = table.timeline.activities.strings
    total_ns: defaultdict[tuple[str, str], int] = defaultdict(int)
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    for path, rows in groups(table.range_path):
        keys = {
            (without_numbers(strings[name]), strings[domain])
            for name, domain in table.ranges[path]
            if strings[domain] not in LIBRARY_DOMAINS
        }
        for key in keys:
            total_ns[key] += int(table.duration_ns[rows].sum())
            counts[key] += len(rows)
    result = (
        NamedRange(*key, counts[key], time_ns, table.share(time_ns))
        for key, time_ns in total_ns.items()
    )
    return tuple(sorted(result, key=lambda row: (-row.total_ns, row.name)))


# --- copies ----------------------------------------------------------------------------------------


def copies(table: WorkTable, kernel_time: IntervalSet) -> tuple[Copies, ...]:
    """Return the copies by direction and kind of host memory, those with the most time first."""
    copy_rows = table.rows_of_kind(WorkKind.COPY)
    direction, source, destination, peer_device = (
        table.field_values(copy_rows, EventKind.COPY_RUN, name).astype(np.int64)
        for name in ("direction", "source_memory", "destination_memory", "peer_device")
    )
    to_device, to_host = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
    host_memory = np.select(
        [direction == to_device, direction == to_host],
        [source, destination],
        int(MemoryKind.DEVICE),
    )
    is_peer = peer_device >= 0
    result = []
    for _, index in groups(direction * 100 + host_memory * 10 + is_peer):
        rows, first = copy_rows[index], index[0]
        size_bytes = int(table.work.size_bytes[rows].astype(object).sum())
        total_ns = int(table.duration_ns[rows].sum())
        overlapped_ns = kernel_time.covered_within(
            table.work.start_ns[rows], table.work.end_ns[rows]
        )
        stack, site = table.stack(rows)
        uses_host = direction[first] in (to_device, to_host)
        result.append(
            Copies(
                direction=Direction(int(direction[first])),
                host=_HOST_MEMORY.get(int(host_memory[first]), "unknown") if uses_host else "none",
                peer=bool(is_peer[first]),
                calls=len(rows),
                size_bytes=size_bytes,
                total_ns=total_ns,
                bytes_per_s=size_bytes / total_ns * 1e9 if total_ns else None,
                overlapped_ns=int(overlapped_ns.sum()),
                stack=stack,
                site=site,
            )
        )
    return tuple(sorted(result, key=lambda row: -row.total_ns))


# --- streams ---------------------------------------------------------------------------------------


def streams(table: WorkTable) -> tuple[StreamWork, ...]:
    """Return the streams, the one with the most time first."""
    rows_by_stream = groups(table.work.stream)
    intervals = [table.intervals(rows) for _, rows in rows_by_stream]
    is_kernel = table.work.kind == WorkKind.KERNEL
    result = []
    for (stream, rows), busy, alone_ns in zip(
        rows_by_stream, intervals, _exclusive_times(intervals), strict=True
    ):
        kernel_rows = rows[is_kernel[rows]]
        # Kernels that use at most half of the multiprocessors.
        small = kernel_rows[_blocks(table, kernel_rows) * 2 <= table.limits.multiprocessors]
        small_ns = int(table.duration_ns[small].sum())
        result.append(StreamWork(stream, len(rows), busy.total_ns, alone_ns, small_ns))
    return tuple(sorted(result, key=lambda row: -row.busy_ns))


def _exclusive_times(interval_sets: Sequence[IntervalSet]) -> list[int]:
    """Return the time of each set of intervals in which no other set has an interval."""
    if not interval_sets:
        return []
    counts = [len(intervals) for intervals in interval_sets]
    set_number = np.repeat(np.arange(len(interval_sets)), counts)
    times = np.concatenate(
        [
            *(intervals.start_ns for intervals in interval_sets),
            *(intervals.end_ns for intervals in interval_sets),
        ]
    )
    order = np.argsort(times, kind="stable")
    times = times[order]
    open_count = np.cumsum(np.repeat([1, -1], sum(counts))[order])
    # While only one set has an open interval, the sum of the numbers of open sets is the number of that set.
    open_numbers = np.cumsum(np.concatenate([set_number, -set_number])[order])
    is_alone = open_count[:-1] == 1
    exclusive_ns = np.zeros(len(interval_sets), np.int64)
    np.add.at(exclusive_ns, open_numbers[:-1][is_alone], np.diff(times)[is_alone])
    result: list[int] = exclusive_ns.tolist()
    return result


# --- waits and allocations of the host -------------------------------------------------------------


def host_waits(
    timeline: Timeline,
    cause_of_call: Column,
    gaps: Gaps,
    is_call_measured: Column,
    is_gap_measured: Column,
) -> tuple[HostWait, ...]:
    """Return the calls that made the host wait, those with the most idle time first.

    The masks say which calls and which gaps are in measured steps; the device runs later than the host.
    """
    calls, blocking = timeline.calls, gaps.blocking
    kinds: tuple[tuple[IdleCause, Literal["wait", "allocation"]], ...] = (
        (IdleCause.HOST_WAIT, "wait"),
        (IdleCause.ALLOCATION, "allocation"),
    )
    result: list[HostWait] = []
    for cause, kind in kinds:
        idle_rows = np.flatnonzero(is_gap_measured[blocking.gap] & (blocking.cause == cause))
        idle_ns = {
            site: int(blocking.idle_ns[idle_rows[index]].sum())
            for site, index in groups(blocking.site[idle_rows])
        }
        call_rows = np.flatnonzero(is_call_measured & (cause_of_call == cause))
        for site, index in groups(calls.site[call_rows]):
            rows = call_rows[index]
            stack = timeline.stacks[site]
            functions, counts = np.unique(calls.name[rows], return_counts=True)
            result.append(
                HostWait(
                    kind=kind,
                    function=timeline.names[int(functions[np.argmax(counts)])],
                    calls=len(rows),
                    blocked_ns=int((calls.end_ns[rows] - calls.start_ns[rows]).sum()),
                    idle_ns=idle_ns.get(site, 0),
                    stack=stack,
                    site=call_site_index(stack),
                )
            )
    return tuple(sorted(result, key=lambda row: (-row.idle_ns, -row.blocked_ns)))


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

    def resident_blocks(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Return how many blocks of a kernel fit on one multiprocessor; at least 1, because it ran."""
        warps = max(math.ceil(threads / _WARP_THREADS), 1)
        limits = [self.blocks, self.threads // (warps * _WARP_THREADS)]
        if registers:
            registers_per_warp = _round_up(registers * _WARP_THREADS, _REGISTER_UNIT)
            resident_warps = self.registers // registers_per_warp // _WARP_GROUP * _WARP_GROUP
            limits.append(resident_warps // warps)
        if block_bytes := _round_up(shared_bytes, _SHARED_UNIT_BYTES) + self.reserved_shared_bytes:
            limits.append(self.shared_bytes // block_bytes)
        return max(min(limits), 1)


def grid_fill(
    limits: DeviceLimits, *, blocks: int, threads: int, registers: int, shared_bytes: int
) -> Grid:
    """Return how the grid of a kernel fills a device whose limits are known.

    The device runs as many blocks at the same time as fit; this is one wave. If all blocks take the same
    time, multiprocessors without a block of the last wave are idle.
    """
    wave_blocks = limits.resident_blocks(threads, registers, shared_bytes) * limits.multiprocessors
    waves = blocks / wave_blocks
    resident_threads = min(blocks, wave_blocks) * threads
    return Grid(
        blocks=blocks,
        threads_per_block=threads,
        registers_per_thread=registers,
        shared_bytes_per_block=shared_bytes,
        multiprocessors_share=min(blocks / limits.multiprocessors, 1.0),
        threads_share=min(resident_threads / (limits.multiprocessors * limits.threads), 1.0),
        waves=waves,
        tail_share=1 - waves / math.ceil(waves) if waves else 0.0,
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
