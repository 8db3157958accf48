"""Analyze the activities of a program: the use of GPU time, and changes that make the program faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.profile import tables
from cudakit.profile.activities import Activities
from cudakit.profile.collectives import collectives, is_collective_kernel, match_collectives
from cudakit.profile.findings import find
from cudakit.profile.idle import (
    Gaps,
    IdleCause,
    IntervalSet,
    Ints,
    ThreadTime,
    busy_time,
    call_causes,
    divide_thread,
    find_gaps,
)
from cudakit.profile.result import (
    Device,
    IdleTime,
    ProfileResult,
    Step,
    Steps,
    TimeDivision,
)
from cudakit.profile.steps import (
    DeviceSteps,
    HostSteps,
    OpenRanges,
    find_steps,
    open_ranges,
    steps_of_device,
)
from cudakit.profile.tables import DeviceLimits, host_waits
from cudakit.profile.timeline import Timeline, WorkKind, first_time, timeline
from cudakit.trace.kinds import EventKind
from cudakit.trace.run_log import reasons_for_missing_events

# Maximum number of steps that a profile result lists; its sums include all steps.
_MAX_STEPS = 10_000


# First words of the reason of a GAP record for a collective of unknown size (model/collectives.c).
_UNKNOWN_COLLECTIVE = "collective whose buffers are unknown"


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """The options of an analysis."""

    range_name: str | None = (
        None  # name of the NVTX range that is a step; None: steps are found automatically
    )


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
    spec: ProfileSpec | None = None,
    *,
    demangle: Callable[[str], str] = str,
    exit_status: int | None = None,
    notes: Sequence[str] = (),
    incomplete: Sequence[str] = (),
) -> Analysis:
    """Return where the GPU time of all processes went.

    ``demangle`` returns the readable form of a kernel's name. ``notes`` and ``incomplete`` are sentences
    about the recording.
    """
    spec = spec or ProfileSpec()
    timelines = [timeline(process_activities) for process_activities in activities]
    origin_ns = first_time(timelines)
    lost_event_counts = _lost_events(activities)
    analyzed_devices = [
        analyzed_device
        for process_timeline in timelines
        for analyzed_device in _Process(process_timeline, spec, demangle, origin_ns).devices()
    ]
    devices = [device for device, _ in analyzed_devices]
    measured_times = {
        (device.process, device.device): (
            device.measured.start_ns + origin_ns,
            device.measured.end_ns + origin_ns,
        )
        for device in devices
    }
    result = ProfileResult(
        exit_status=exit_status,
        simulated=any(process_activities.simulated for process_activities in activities),
        devices=tuple(devices),
        findings=find(
            devices, is_lossy=bool(lost_event_counts or reasons_for_missing_events(incomplete))
        ),
        straggler=match_collectives(timelines, measured_times),
        limits=(),
        gaps=lost_event_counts,
        notes=tuple(notes),
        incomplete=tuple(incomplete),
    )
    gaps = (DeviceGaps(device.process, device.device, gaps) for device, gaps in analyzed_devices)
    return Analysis(result, tuple(gaps))


def _lost_events(activities: Sequence[Activities]) -> dict[str, int]:
    """Return the number of missing events for each reason."""
    lost_event_counts: Counter[str] = Counter()
    for process_activities in activities:
        rows = process_activities.records_of(EventKind.GAP)
        for reason, lost_count in zip(rows["reason"].tolist(), rows["count"].tolist(), strict=True):
            reason_text = process_activities.strings[reason]
            if not reason_text.startswith(_UNKNOWN_COLLECTIVE):
                lost_event_counts[reason_text] += lost_count
    return dict(lost_event_counts)


class _Process:
    """The analysis of one process."""

    def __init__(
        self,
        process_timeline: Timeline,
        spec: ProfileSpec,
        demangle: Callable[[str], str],
        origin_ns: int,
    ) -> None:
        self._timeline = process_timeline
        self._demangle = demangle
        self._origin_ns = origin_ns
        self._steps: HostSteps = find_steps(process_timeline, spec.range_name)
        calls, work = process_timeline.calls, process_timeline.work
        self._call_cause = call_causes(process_timeline)
        launching_threads = np.unique(calls.thread[work.call[work.call >= 0]]).tolist()
        self._time_by_thread: dict[int, ThreadTime] = {
            thread: divide_thread(process_timeline, self._call_cause, thread)
            for thread in launching_threads
        }
        self._ranges, self._range_path = self._work_ranges()

    def devices(self) -> Iterator[tuple[Device, Gaps]]:
        """Yield the analysis of each device that has work, and its gaps."""
        for device in np.unique(self._timeline.work.device).tolist():
            yield self._device(device)

    def _work_ranges(self) -> tuple[OpenRanges, Ints]:
        """Return the NVTX ranges that were open at the launch of each piece of work."""
        calls, call_of_work = self._timeline.calls, self._timeline.work.call
        range_path = np.zeros(len(call_of_work), np.int64)
        has_call = call_of_work >= 0
        ranges, range_path[has_call] = open_ranges(
            self._timeline.activities,
            calls.thread[call_of_work[has_call]],
            calls.start_ns[call_of_work[has_call]],
        )
        return ranges, range_path

    def _device(self, device: int) -> tuple[Device, Gaps]:
        work = self._timeline.work
        rows = np.flatnonzero(work.device == device)
        first_ns, last_ns = int(work.start_ns[rows[0]]), int(work.end_ns[rows].max())
        steps = steps_of_device(self._timeline, rows, self._steps)
        gaps = find_gaps(self._timeline, rows, self._time_by_thread)
        if steps.count:
            _reclassify_start_up(gaps, int(steps.begin_ns[0]))
        division = _Division(
            busy_time(self._timeline, rows),
            gaps,
            first_ns,
            last_ns,
            self._origin_ns,
        )
        measured_rows = rows[steps.contains(work.start_ns[rows])] if steps.count else rows
        name, limits = self._device_facts(device)
        table = tables.WorkTable(
            self._timeline,
            measured_rows,
            self._range_path[measured_rows],
            self._ranges,
            limits,
            self._demangle,
        )
        kernels = table.positions_of_kind(WorkKind.KERNEL)
        is_collective = is_collective_kernel(table, kernels)
        kernel_time = table.intervals(kernels)
        compute_time = table.intervals(kernels[~is_collective])
        collective_time = table.intervals(kernels[is_collective])
        copy_time = table.intervals(table.positions_of_kind(WorkKind.COPY))
        window_start, window_end = self._window(first_ns, last_ns)
        device_result = Device(
            process=self._timeline.process,
            rank=self._timeline.activities.rank,
            device=device,
            name=name,
            multiprocessors=limits.multiprocessors,
            recorded=division.divide_interval(window_start, window_end),
            measured=division.measured(steps),
            steps=self._step_rows(steps, division),
            work_ns=table.total_ns,
            launches=len(table.rows),
            kernels=tables.kernels(table),
            lines=tables.lines(table),
            ranges=tables.named_ranges(table),
            copies=tables.copies(table, kernel_time),
            copies_ns=copy_time.total_ns,
            copies_overlapped_ns=tables.overlap(copy_time, kernel_time),
            collectives=collectives(table, kernels[is_collective], compute_time),
            collectives_ns=collective_time.total_ns,
            collectives_overlapped_ns=tables.overlap(collective_time, compute_time),
            streams=tables.streams(table) if len(table.rows) else (),
            waits=host_waits(
                self._timeline,
                self._call_cause,
                division.gaps,
                (lambda time: steps.contains_on_host(self._steps, time)) if steps.count else None,
                steps.contains if steps.count else None,
            ),
            memsets=tables.memsets(table),
            graph_kernels=tables.graph_kernels(table),
        )
        return device_result, division.gaps

    def _device_facts(self, device: int) -> tuple[str, DeviceLimits]:
        """Return the name and the limits of a device, if they were recorded."""
        activities = self._timeline.activities
        rows = activities.records_of(EventKind.DEVICE_INFO)
        rows = rows[rows["device"] == device]
        if not len(rows):
            return "", DeviceLimits(0)
        row = rows[-1]
        limits = DeviceLimits(
            int(row["multiprocessors"]),
            int(row["threads_per_multiprocessor"]),
            int(row["blocks_per_multiprocessor"]),
            int(row["registers_per_multiprocessor"]),
            int(row["shared_bytes_per_multiprocessor"]),
            int(row["reserved_shared_bytes_per_block"]),
        )
        return activities.strings[row["name"]], limits

    def _window(self, first_ns: int, last_ns: int) -> tuple[int, int]:
        """Return the recorded time of the process, which contains the work of a device."""
        windows = self._timeline.activities.records_of(EventKind.PROFILE_WINDOW)
        begin_ns, end_ns = (
            windows["time_ns"][windows["is_open"]],
            windows["time_ns"][~windows["is_open"]],
        )
        start_times = [first_ns, *begin_ns[:1].tolist(), self._timeline.first_ns()]
        end_times = [last_ns, *end_ns[-1:].tolist(), self._timeline.last_ns()]
        return min(time for time in start_times if time is not None), max(
            time for time in end_times if time is not None
        )

    def _step_rows(self, steps: DeviceSteps, division: _Division) -> Steps:
        begins = steps.begin_ns[: _MAX_STEPS + 1].tolist()
        columns = (steps.number.tolist(), steps.is_measured.tolist(), begins, begins[1:])
        rows = tuple(
            Step(
                number=step_number + 1,
                is_warm_up=index < steps.warm_up,
                is_slow=index >= steps.warm_up and not is_measured,
                time=division.divide_interval(start, end),
            )
            for index, (step_number, is_measured, start, end) in enumerate(
                zip(*columns, strict=False)
            )
        )
        durations = np.diff(steps.begin_ns)[steps.is_measured] if steps.count else np.empty(0)
        return Steps(
            source=self._steps.source if rows else "none",
            name=self._steps.name if rows else "",
            warm_up=steps.warm_up,
            slow=steps.count - steps.warm_up - len(durations),
            measured=len(durations),
            median_ns=int(np.median(durations)) if len(durations) else 0,
            steps=rows,
        )


def _reclassify_start_up(gaps: Gaps, first_step_ns: int) -> None:
    """Count data loading before the first step as other host work, such as importing modules."""
    is_before_first_step = gaps.end_ns <= first_step_ns
    loading_ns = gaps.by_cause_ns[is_before_first_step, IdleCause.DATA_LOADING]
    gaps.by_cause_ns[is_before_first_step, IdleCause.OTHER_HOST] += loading_ns
    gaps.by_cause_ns[is_before_first_step, IdleCause.DATA_LOADING] = 0


@dataclass(frozen=True, slots=True)
class _Division:
    """Divides the time of a device into busy and idle time."""

    busy_intervals: IntervalSet
    gaps: Gaps
    first_ns: int  # start of the first work
    last_ns: int  # end of the last work
    origin_ns: int

    def divide_interval(self, start_ns: int, end_ns: int) -> TimeDivision:
        """Divide an interval into busy and idle time; its ends are not within a gap."""
        return self._sum_intervals([start_ns], [end_ns])

    def measured(self, steps: DeviceSteps) -> TimeDivision:
        """Divide the measured steps into busy and idle time; without steps, the time of all work."""
        if not steps.count:
            return self.divide_interval(self.first_ns, self.last_ns)
        start, end = steps.begin_ns[:-1], steps.begin_ns[1:]
        return self._sum_intervals(
            start[steps.is_measured].tolist(), end[steps.is_measured].tolist()
        )

    def _sum_intervals(self, starts: list[int], ends: list[int]) -> TimeDivision:
        """Return the sums of the busy and idle time in sorted intervals."""
        gaps, idle_ns_by_cause = self.gaps, np.zeros(len(IdleCause), np.int64)
        bounds = np.searchsorted(gaps.start_ns, np.array([starts, ends]))
        for first_gap, end_gap in bounds.T.tolist():
            idle_ns_by_cause += gaps.by_cause_ns[first_gap:end_gap].sum(axis=0)
        idle_ns_by_cause[IdleCause.NOT_STARTED] = max(self.first_ns - starts[0], 0)
        idle_ns_by_cause[IdleCause.ENDED] = max(ends[-1] - self.last_ns, 0)
        idle_fields = {
            f"{cause.name.lower()}_ns": int(idle_ns_by_cause[cause]) for cause in IdleCause
        }
        busy_lengths = self.busy_intervals.covered_within(np.array(starts), np.array(ends))
        return TimeDivision(
            start_ns=starts[0] - self.origin_ns,
            end_ns=ends[-1] - self.origin_ns,
            length_ns=sum(ends) - sum(starts),
            busy_ns=int(busy_lengths.sum()),
            idle=IdleTime(**idle_fields),
        )
