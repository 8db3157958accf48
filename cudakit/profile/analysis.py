"""Analyze the activities of a program: the use of GPU time, and changes that make the program faster."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.profile import tables
from cudakit.profile.findings import find
from cudakit.profile.idle import (
    Gaps,
    IdleCause,
    IntervalSet,
    busy_time,
    call_causes,
    divide_thread,
    find_gaps,
    intersection,
)
from cudakit.profile.result import (
    Collective,
    Device,
    IdleTime,
    ProfileResult,
    Step,
    Steps,
    Straggler,
    TimeDivision,
)
from cudakit.profile.steps import DeviceSteps, HostSteps, find_steps, open_ranges, steps_of_device
from cudakit.profile.tables import DeviceLimits, WorkTable, groups
from cudakit.profile.timeline import Activities, Column, Timeline, WorkKind, first_time, timeline
from cudakit.trace.kinds import ELEMENT_BYTES, CollectiveFunction, EventKind, NcclDatatype
from cudakit.trace.run_log import reasons_for_missing_events

# Maximum number of steps that a profile result lists; its sums include all steps.
_MAX_STEPS = 10_000


# First words of the reason of a GAP record for a collective of unknown size (model/collectives.c).
_UNKNOWN_COLLECTIVE = "collective whose buffers are unknown"


@dataclass(frozen=True, slots=True)
class DeviceGaps:
    """The gaps between the work of a process on a device."""

    process: int
    device: int
    gaps: Gaps


@dataclass(frozen=True, slots=True)
class Analysis:
    """The result of an analysis, and the gaps in which devices were idle."""

    result: ProfileResult
    gaps: tuple[DeviceGaps, ...]


def analyze(
    activities: Sequence[Activities],
    *,
    step_range: str | None = None,
    demangle: Callable[[str], str] = str,
    exit_status: int | None = None,
    notes: Sequence[str] = (),
    incomplete: Sequence[str] = (),
) -> Analysis:
    """Return where the GPU time of all processes went.

    ``step_range`` is the name of the NVTX range that is a step; by default, steps are found. ``demangle``
    returns the readable form of a kernel's name. ``notes`` and ``incomplete`` are sentences about the
    recording.
    """
    timelines = [timeline(process_activities) for process_activities in activities]
    origin_ns = first_time(timelines)
    analyzed = [
        device
        for process in timelines
        for device in _devices(process, step_range, demangle, origin_ns)
    ]
    devices = tuple(device for device, _ in analyzed)
    measured_times = {
        (device.process, device.device): (
            device.measured.start_ns + origin_ns,
            device.measured.end_ns + origin_ns,
        )
        for device in devices
    }
    lost: Counter[str] = Counter()
    for process_activities in activities:
        for record in process_activities.records[EventKind.GAP]:
            reason = process_activities.strings[record["reason"]]
            if not reason.startswith(_UNKNOWN_COLLECTIVE):
                lost[reason] += int(record["count"])
    result = ProfileResult(
        exit_status=exit_status,
        simulated=any(process.simulated for process in timelines),
        devices=devices,
        findings=find(devices, is_lossy=bool(lost or reasons_for_missing_events(incomplete))),
        straggler=match_collectives(timelines, measured_times),
        limits=(),
        gaps=dict(lost),
        notes=tuple(notes),
        incomplete=tuple(incomplete),
    )
    return Analysis(
        result, tuple(DeviceGaps(device.process, device.device, gaps) for device, gaps in analyzed)
    )


def _devices(
    process: Timeline, step_range: str | None, demangle: Callable[[str], str], origin_ns: int
) -> Iterator[tuple[Device, Gaps]]:
    """Yield the analysis of each device on which the process has work, and its gaps."""
    calls, work = process.calls, process.work
    host_steps = find_steps(process, step_range)
    cause_of_call = call_causes(process)
    has_call = work.call >= 0
    launching_calls = work.call[has_call]
    threads = {
        thread: divide_thread(process, cause_of_call, thread)
        for thread in np.unique(calls.thread[launching_calls]).tolist()
    }
    range_path = np.zeros(len(work.call), np.int64)
    ranges, range_path[has_call] = open_ranges(
        process.activities, calls.thread[launching_calls], calls.start_ns[launching_calls]
    )
    for device in np.unique(work.device).tolist():
        rows = np.flatnonzero(work.device == device)
        first_ns, last_ns = int(work.start_ns[rows[0]]), int(work.end_ns[rows].max())
        steps = steps_of_device(process, rows, host_steps)
        gaps = find_gaps(process, rows, threads)
        is_call_measured = np.ones(len(calls.start_ns), bool)
        is_gap_measured = np.ones(len(gaps.start_ns), bool)
        starts, ends, measured_rows = [first_ns], [last_ns], rows
        if steps.count:
            # Data loading before the first step is other host work, such as importing modules.
            is_before = gaps.end_ns <= int(steps.begin_ns[0])
            gaps.by_cause_ns[is_before, IdleCause.OTHER_HOST] += gaps.by_cause_ns[
                is_before, IdleCause.DATA_LOADING
            ]
            gaps.by_cause_ns[is_before, IdleCause.DATA_LOADING] = 0
            is_call_measured = steps.contains_on_host(host_steps, calls.start_ns)
            is_gap_measured = steps.contains(gaps.start_ns)
            starts = steps.begin_ns[:-1][steps.is_measured].tolist()
            ends = steps.begin_ns[1:][steps.is_measured].tolist()
            measured_rows = rows[steps.contains(work.start_ns[rows])]
        division = _Division(busy_time(process, rows), gaps, first_ns, last_ns, origin_ns)
        name, limits = _device_facts(process.activities, device)
        measured_work = work.rows(measured_rows)
        table = WorkTable(
            process,
            measured_work,
            measured_work.end_ns - measured_work.start_ns,
            range_path[measured_rows],
            ranges,
            limits,
            demangle,
        )
        kernels = table.rows_of_kind(WorkKind.KERNEL)
        nccl_names = [
            kernel
            for kernel in np.unique(measured_work.name[kernels]).tolist()
            if is_collective(process, kernel)
        ]
        is_nccl = np.isin(measured_work.name[kernels], nccl_names)
        kernel_time = table.intervals(kernels)
        compute_time = table.intervals(kernels[~is_nccl])
        collective_time = table.intervals(kernels[is_nccl])
        copy_time = table.intervals(table.rows_of_kind(WorkKind.COPY))
        analyzed = Device(
            process=process.process,
            rank=process.activities.rank,
            device=device,
            name=name,
            multiprocessors=limits.multiprocessors,
            recorded=division.sums(*_window(process, first_ns, last_ns)),
            measured=division.sums(starts, ends),
            steps=_steps(steps, host_steps, division),
            work_ns=table.total_ns,
            launches=len(measured_rows),
            kernels=tables.kernels(table),
            lines=tables.lines(table),
            ranges=tables.named_ranges(table),
            copies=tables.copies(table, kernel_time),
            copies_ns=copy_time.total_ns,
            copies_overlapped_ns=intersection(copy_time, kernel_time).total_ns,
            collectives=collectives(table, kernels[is_nccl], compute_time),
            collectives_ns=collective_time.total_ns,
            collectives_overlapped_ns=intersection(collective_time, compute_time).total_ns,
            streams=tables.streams(table),
            waits=tables.host_waits(
                process, cause_of_call, gaps, is_call_measured, is_gap_measured
            ),
            memsets=tables.memsets(table),
            graph_kernels=tables.graph_kernels(table),
        )
        yield analyzed, gaps


def _device_facts(activities: Activities, device: int) -> tuple[str, DeviceLimits]:
    """Return the name and the limits of a device, if they were recorded."""
    records = activities.records[EventKind.DEVICE_INFO]
    records = records[records["device"] == device]
    if not len(records):
        return "", DeviceLimits(0)
    record = records[-1]
    limits = DeviceLimits(
        int(record["multiprocessors"]),
        int(record["threads_per_multiprocessor"]),
        int(record["blocks_per_multiprocessor"]),
        int(record["registers_per_multiprocessor"]),
        int(record["shared_bytes_per_multiprocessor"]),
        int(record["reserved_shared_bytes_per_block"]),
    )
    return activities.strings[record["name"]], limits


def _window(process: Timeline, first_ns: int, last_ns: int) -> tuple[list[int], list[int]]:
    """Return the recorded time of the process, which contains the work of a device."""
    windows = process.activities.records[EventKind.PROFILE_WINDOW]
    times, is_open = windows["time_ns"], windows["is_open"]
    starts = [first_ns, *times[is_open][:1].tolist(), process.first_ns()]
    ends = [last_ns, *times[~is_open][-1:].tolist(), process.last_ns()]
    return [min(starts)], [max(ends)]


def _steps(steps: DeviceSteps, host_steps: HostSteps, division: _Division) -> Steps:
    begins = steps.begin_ns[: _MAX_STEPS + 1].tolist()
    columns = (steps.number.tolist(), steps.is_measured.tolist(), begins, begins[1:])
    rows = tuple(
        Step(
            number=number + 1,
            is_warm_up=index < steps.warm_up,
            is_slow=index >= steps.warm_up and not is_measured,
            time=division.sums([start], [end]),
        )
        for index, (number, is_measured, start, end) in enumerate(zip(*columns, strict=False))
    )
    durations = np.diff(steps.begin_ns)[steps.is_measured] if steps.count else np.empty(0)
    return Steps(
        source=host_steps.source if rows else "none",
        name=host_steps.name if rows else "",
        warm_up=steps.warm_up,
        slow=steps.count - steps.warm_up - len(durations),
        measured=len(durations),
        median_ns=int(np.median(durations)) if len(durations) else 0,
        steps=rows,
    )


@dataclass(frozen=True, slots=True)
class _Division:
    """Divides the time of a device into busy and idle time."""

    busy: IntervalSet
    gaps: Gaps
    first_ns: int  # start of the first work
    last_ns: int  # end of the last work
    origin_ns: int

    def sums(self, starts: list[int], ends: list[int]) -> TimeDivision:
        """Return the sums of busy and idle time in sorted intervals, whose ends are not within a gap."""
        idle_ns = np.zeros(len(IdleCause), np.int64)
        for first, end in np.searchsorted(self.gaps.start_ns, np.array([starts, ends])).T.tolist():
            idle_ns += self.gaps.by_cause_ns[first:end].sum(axis=0)
        idle_ns[IdleCause.NOT_STARTED] = max(self.first_ns - starts[0], 0)
        idle_ns[IdleCause.ENDED] = max(ends[-1] - self.last_ns, 0)
        busy_ns = self.busy.covered_within(np.array(starts), np.array(ends))
        return TimeDivision(
            start_ns=starts[0] - self.origin_ns,
            end_ns=ends[-1] - self.origin_ns,
            length_ns=sum(ends) - sum(starts),
            busy_ns=int(busy_ns.sum()),
            idle=IdleTime(
                **{f"{cause.name.lower()}_ns": int(idle_ns[cause]) for cause in IdleCause}
            ),
        )


# --- Sum the collectives of NCCL, with their rates; find the rank that the others wait for ---------
#
# NCCL 2.28 and newer reports the size of each operation to its profiler plugin, which is the recorder. The
# kernels of a CUDA graph, and the kernels of older versions, have no size. Rates are those of nccl-tests
# (https://github.com/NVIDIA/nccl-tests, PERFORMANCE.md): the algorithm bandwidth is the size of an
# operation divided by its time. The bus bandwidth is the algorithm bandwidth times a factor, which depends
# on the operation and on the number of ranks; it is comparable with the rate of the links.


def is_collective(timeline: Timeline, name: int) -> bool:
    """Return whether a kernel is a collective: NCCL names them ncclDevKernel_* or ncclKernel_*."""
    return timeline.names[name].startswith(("ncclDev", "ncclKernel"))


def collectives(
    table: WorkTable, collective_rows: Column, compute_time: IntervalSet
) -> tuple[Collective, ...]:
    """Return the collectives by kernel and size; ``collective_rows`` has all collective kernels."""
    work = table.work
    sizes_by_correlation = _operations_by_correlation(table.timeline)
    # The correlation of a graph's kernel is that of the graph, so the kernel has no size.
    correlations = np.where(work.graph_node == 0, work.correlation, 0)[collective_rows].tolist()
    # Size, size times the bus factor, and number of ranks; 0 if NCCL did not report them.
    sizes = [sizes_by_correlation.get(correlation, (0, 0.0, 0)) for correlation in correlations]
    names = work.name[collective_rows].tolist()
    positions: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for position, (name, (size_bytes, _, ranks)) in enumerate(zip(names, sizes, strict=True)):
        positions[name, size_bytes, ranks].append(position)
    result = []
    for (name, size_bytes, ranks), index in sorted(positions.items()):
        rows = collective_rows[index]
        stack, site = table.stack(rows)
        total_ns = int(table.duration_ns[rows].sum())
        overlapped_ns = compute_time.covered_within(work.start_ns[rows], work.end_ns[rows])
        bus_bytes = sum(sizes[position][1] for position in index)
        has_rate = size_bytes > 0 and total_ns > 0
        result.append(
            Collective(
                name=table.demangle(table.timeline.names[name]),
                calls=len(rows),
                total_ns=total_ns,
                overlapped_ns=int(overlapped_ns.sum()),
                stack=stack,
                site=site,
                ranks=ranks or None,
                size_bytes=size_bytes or None,
                algorithm_bytes_per_s=size_bytes * len(rows) / total_ns * 1e9 if has_rate else None,
                bus_bytes_per_s=bus_bytes / total_ns * 1e9 if has_rate else None,
            )
        )
    return tuple(sorted(result, key=lambda row: -row.total_ns))


def _operations_by_correlation(timeline: Timeline) -> dict[int, tuple[int, float, int]]:
    """Return by correlation the size, the size times the bus factor, and the number of ranks of operations.

    A call launches several operations if the program groups them. Calls with an operation of unknown size
    have no entry.
    """
    records = timeline.activities.records
    operations, communicators = records[EventKind.COLLECTIVE], records[EventKind.COMMUNICATOR]
    launches = records[EventKind.API_CALL]
    launches = launches[np.isin(launches["seq"], operations["seq"])]
    correlation_of_call = dict(
        zip(launches["seq"].tolist(), launches["correlation"].tolist(), strict=True)
    )
    # NCCL does not report the number of ranks of every communicator.
    rank_counts = {
        communicator: ranks
        for communicator, ranks in communicators[["communicator", "rank_count"]].tolist()
        if ranks
    }
    sizes: dict[int, tuple[int, float, int]] = {}
    without_size = set()
    fields = ["seq", "function", "datatype", "element_count", "communicator"]
    for seq, function, datatype, elements, communicator in operations[fields].tolist():
        correlation = correlation_of_call.get(seq, 0)
        ranks = rank_counts.get(communicator, 0)
        size_bytes, bus_bytes = _sizes(
            CollectiveFunction(function), NcclDatatype(datatype), elements, ranks
        )
        if not size_bytes or not correlation:
            without_size.add(correlation)
            continue
        earlier_bytes, earlier_bus_bytes, _ = sizes.get(correlation, (0, 0.0, 0))
        sizes[correlation] = earlier_bytes + size_bytes, earlier_bus_bytes + bus_bytes, ranks
    return {number: size for number, size in sizes.items() if number not in without_size}


def _sizes(
    function: CollectiveFunction, datatype: NcclDatatype, elements: int, ranks: int
) -> tuple[int, float]:
    """Return the size of an operation as nccl-tests count it, and times its bus factor; 0 if unknown."""
    if function is CollectiveFunction.UNKNOWN or datatype is NcclDatatype.UNKNOWN or not ranks:
        return 0, 0.0
    size_bytes = elements * ELEMENT_BYTES[datatype]
    # The element count of these functions is that of one rank; their size is the sum over all ranks.
    if function in (CollectiveFunction.ALL_GATHER, CollectiveFunction.REDUCE_SCATTER):
        return size_bytes * ranks, size_bytes * (ranks - 1)
    if function is CollectiveFunction.ALL_REDUCE:
        return size_bytes, size_bytes * 2 * (ranks - 1) / ranks
    return size_bytes, size_bytes


# --- the rank that the others wait for -------------------------------------------------------------


def match_collectives(
    timelines: Sequence[Timeline], measured_times: Mapping[tuple[int, int], tuple[int, int]]
) -> Straggler | None:
    """Return the rank that the other ranks waited for; None if the ranks ran different collectives.

    ``measured_times`` has for each process and device the start and the end of the measured time, in
    nanoseconds; other collectives are not counted.

    A rank is one device of one process. A collective begins on a rank when its kernel starts, and cannot
    complete before it has begun on all ranks, so that all ranks wait for the last one. The times of all
    processes are on the same clock, because the processes run on one machine.
    """
    ranks = [
        (timeline.process, device, starts)
        for timeline in timelines
        for device in np.unique(timeline.work.device).tolist()
        if (starts := _collective_starts(timeline, device))
    ]
    if len(ranks) < 2:
        return None
    counts = [{name: len(starts[name]) for name in starts} for _, _, starts in ranks]
    if any(of_rank != counts[0] for of_rank in counts):
        return None
    # A row for each rank, a column for each collective.
    start_ns = np.concatenate(
        [np.stack([starts[name] for _, _, starts in ranks]) for name in counts[0]], axis=1
    )
    measured = np.array([measured_times[process, device] for process, device, _ in ranks])
    begin_ns, end_ns = measured.T[:, :, np.newaxis]
    start_ns = start_ns[:, ((begin_ns <= start_ns) & (start_ns <= end_ns)).all(axis=0)]
    if not start_ns.shape[1]:
        return None
    last_rank = start_ns.argmax(axis=0)
    waited_ns = (start_ns.max(axis=0) - start_ns).sum(axis=0)
    last_counts = np.bincount(last_rank, minlength=len(ranks))
    straggler = int(last_counts.argmax())
    process, device, _ = ranks[straggler]
    return Straggler(
        matched=start_ns.shape[1],
        process=process,
        device=device,
        last_count=int(last_counts[straggler]),
        waited_ns=int(waited_ns[last_rank == straggler].sum()),
    )


def _collective_starts(timeline: Timeline, device: int) -> dict[str, Column]:
    """Return the start times of the NCCL kernels of a device by name, sorted."""
    work = timeline.work
    rows = np.flatnonzero((work.device == device) & (work.kind == WorkKind.KERNEL))
    return {
        timeline.names[name]: work.start_ns[rows[index]]
        for name, index in groups(work.name[rows])
        if is_collective(timeline, name)
    }
