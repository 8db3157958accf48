"""Benchmark of the overlap of copies and GEMMs that run on two streams.

Each direction and size has five measurements, whose samples are interleaved: the copies alone, the GEMMs
alone, both together, the copies while GEMMs run all the time, and the GEMMs while copies run all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

from cudakit.bench.case import (
    Case,
    PreparedWorkload,
    Rule,
    Verification,
    create_event,
    create_stream,
    worst_verification,
)
from cudakit.bench.copy import DIRECTIONS as COPY_DIRECTIONS
from cudakit.bench.copy import WORD_BYTES, Copy, count_buffers, is_pageable
from cudakit.bench.gemm import GemmWorkload
from cudakit.bench.gemm_check import operand_bytes
from cudakit.bench.labels import CUDAKIT, MEASUREMENT_AXIS, Axis
from cudakit.bench.report.table import cell, text_range
from cudakit.bench.result import BenchResult, CaseResult, CopyOverlap
from cudakit.bench.spec import Spec, check_names, check_sizes
from cudakit.bench.stats import Summary
from cudakit.bench.timer import MAX_QUEUED
from cudakit.bench.words import Words
from cudakit.errors import InputError
from cudakit.gpu.api import LEGACY, DeviceInfo, Gpu, Stream
from cudakit.gpu.api.gemm import Gemm, GemmSettings
from cudakit.report.document import (
    Bytes,
    Column,
    Node,
    Note,
    Rate,
    Ratio,
    Seconds,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable, format_bytes

DIRECTIONS = ("h2d", "d2h", "pageable-h2d", "pageable-d2h", "d2d")
# The measurements of an overlap.
COPY, GEMM, BOTH = "copy", "gemm", "both"
COPY_DURING_GEMM, GEMM_DURING_COPY = "copy-during-gemm", "gemm-during-copy"
MEASUREMENTS = (COPY, GEMM, BOTH, COPY_DURING_GEMM, GEMM_DURING_COPY)
_CONCURRENT = (COPY_DURING_GEMM, GEMM_DURING_COPY)

# Size of a copy: larger than the L2 cache, and small enough that filling and checking host memory is fast.
_SIZE_BYTES, _SIMULATED_SIZE_BYTES = 64 << 20, 256 << 10
# m, n and k of the GEMM: large enough to use all multiprocessors of a GPU.
_EDGE, _SIMULATED_EDGE = 4096, 64
_DTYPE = "bf16"
# Minimum duration of the copies and of the GEMMs: the streams start some microseconds apart, which is
# negligible in this time. Launches on a simulated device take less time.
_MIN_S, _SIMULATED_MIN_S = 5e-3, 20e-6
# Maximum number of copies, and of GEMMs, of one execution. With a blocking kernel, the timed work and
# _CONCURRENT_FACTOR times both kinds of untimed work must fit in the launch queue of the device.
_MAX_REPETITIONS, _MAX_REPETITIONS_UNBLOCKED = MAX_QUEUED // 7, MAX_QUEUED // 2
# The untimed work is at first this many times as long as the timed work beside which it runs, so that it does
# not end first if it slows the timed work down. Copies within the device take six times as long beside GEMMs.
# Before GEMMs are timed, this many times their number of GEMMs runs: a GPU at its power limit lowers its
# clock during GEMMs and raises it during copies, so the clock would depend on the previous sample.
_CONCURRENT_FACTOR = 3
# The untimed work becomes this many times as long if it ended first in a sample.
_CONCURRENT_GROWTH = 4
# Numbers of executions of a timed run: a run that lasts less than _MIN_PILOT_S is repeated with the second
# number, because the first launches take longer on the host than a short copy on the device.
_PILOT_EXECUTIONS = (4, 64)
_MIN_PILOT_S = 2e-3
# Number of timed runs, of which the fastest one is the estimate.
_PILOT_RUNS = 2
# Maximum duration of a warm-up, relative to its minimum. At the power limit the clock never settles, and the
# untimed GEMMs before each sample continue the warm-up.
_MAX_WARMUP_FACTOR = 3
_COPIES, _GEMMS, _GEMM_FLOP = "copies", "gemms", "gemm_flop"
_Time: TypeAlias = float | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSpec(Spec):
    """Options of ``cudakit bench copy --overlap gemm``."""

    bench: ClassVar[str] = "copy-overlap"

    # Each of the five measurements of a case has a warm-up, so each of them can be short.
    warmup_s: float = 0.1
    rounds: int = 2
    # GEMMs at the power limit vary by some percent, so a smaller interval would take much longer.
    rule: Rule = Rule(precision=0.02, timeout_s=3.0)
    directions: tuple[str, ...] = DIRECTIONS
    sizes_bytes: tuple[int, ...] | None = None  # Sizes of each copy; None: one size.

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_names("direction", self.directions, COPY_DIRECTIONS)
        for direction in self.directions:
            if direction not in DIRECTIONS:
                raise InputError(
                    f"--overlap cannot be measured for --directions {direction}",
                    hint=f"choose from {', '.join(DIRECTIONS)}",
                )
        check_sizes(self.sizes_bytes, WORD_BYTES)

    def cases(self, gpu: DeviceInfo) -> tuple[Case, ...]:
        """Return a case per size and direction, with an implementation per measurement.

        All directions have the first size before the second size follows, so that an interrupted run has
        figures of most directions.
        """
        default_size_bytes = _SIMULATED_SIZE_BYTES if gpu.simulated else _SIZE_BYTES
        edge = _SIMULATED_EDGE if gpu.simulated else _EDGE
        shape = Gemm(dtype=_DTYPE, m=edge, n=edge, k=edge)
        gemm = GemmWorkload(shape, GemmSettings(), "cublaslt", "uniform")
        sizes_bytes = self.sizes_bytes or (default_size_bytes,)
        copies = (Copy(direction, size) for size in sizes_bytes for direction in self.directions)
        return tuple(_case(self, copy, gemm) for copy in copies)

    def conclude(self, result: BenchResult, cases: Sequence[Case]) -> BenchResult:
        """Add the overlap of each planned direction and size."""
        return replace(result, overlaps=copy_overlaps(result.results, cases))


def _case(spec: OverlapSpec, copy: Copy, gemm: GemmWorkload) -> Case:
    has_pageable_memory = is_pageable(copy.direction)
    repetitions = Repetitions(
        _MAX_REPETITIONS_UNBLOCKED if has_pageable_memory else _MAX_REPETITIONS
    )
    workloads = [
        # Interleaved workloads must have different names.
        OverlapWorkload(copy, gemm, measurement, repetitions, f"{spec.bench} {measurement}")
        for measurement in MEASUREMENTS
        if measurement != GEMM_DURING_COPY or not has_pageable_memory
    ]
    device_buffer_count, host_buffer_count = count_buffers(copy.direction)
    method = spec.method("isolated", "hot", fill="uniform")
    return Case(
        replace(workloads[0], name=spec.bench),
        # A copy of pageable memory blocks the host, which then could not end the blocking kernel.
        replace(
            method,
            blocker=method.blocker and not has_pageable_memory,
            warmup_most_s=_MAX_WARMUP_FACTOR * method.warmup_s,
        ),
        Unavailable("the peak of work on two streams is unknown"),
        copy.size_bytes,
        len(workloads) * device_buffer_count,
        host_bytes=len(workloads) * host_buffer_count * copy.size_bytes,
        other_buffer_bytes=len(workloads)
        * (operand_bytes(gemm.gemm) + gemm.settings.workspace_bytes),
        baselines=tuple(workloads[1:]),
    )


class Repetitions:
    """The numbers of copies and of GEMMs in one execution, chosen so that both take about the same time.

    All measurements of a case share the numbers, which the first prepared workload measures.
    """

    def __init__(self, max_repetitions: int) -> None:
        self.max_repetitions = max_repetitions  # Largest number of copies, and of GEMMs.
        self.copies = self.gemms = 0  # Both numbers are 0 until they are chosen.

    def choose(self, gpu: Gpu, copy: PreparedWorkload, gemm: PreparedWorkload) -> None:
        """Choose the numbers of copies and GEMMs from their times, unless a previous call chose them."""
        if self.copies:
            return
        copy_s, gemm_s = _time_alone(gpu, copy), _time_alone(gpu, gemm)
        longer_s, min_s = max(copy_s, gemm_s), _SIMULATED_MIN_S if gpu.simulated else _MIN_S
        # The target is a multiple of the longer time; repetitions of the shorter work last about as long.
        target_s = max(1, round(min_s / longer_s)) * longer_s
        # If the number of repetitions of the shorter work is limited, both take less time.
        target_s = min(target_s, self.max_repetitions * min(copy_s, gemm_s))
        self.copies, self.gemms = (max(1, round(target_s / time_s)) for time_s in (copy_s, gemm_s))


def _time_alone(gpu: Gpu, prepared_workload: PreparedWorkload) -> float:
    """Return the time of one execution on an idle device in seconds."""
    time_s = 0.0
    with ExitStack() as cleanup:
        begin_event, end_event = (create_event(gpu, cleanup, timing=True) for _ in range(2))
        for executions in _PILOT_EXECUTIONS:
            times_s = []
            for _ in range(_PILOT_RUNS):
                gpu.record(begin_event, LEGACY)
                for _ in range(executions):
                    prepared_workload.enqueue(LEGACY, 0)
                gpu.record(end_event, LEGACY)
                gpu.sync()
                times_s.append(gpu.elapsed(begin_event, end_event))
            time_s = min(times_s) / executions
            if min(times_s) >= _MIN_PILOT_S:
                break
    return max(time_s, 1e-9)


@dataclass(frozen=True, slots=True)
class OverlapWorkload:
    """One measurement of the overlap of a copy and a GEMM."""

    copy: Copy
    gemm: GemmWorkload
    measurement: str  # One of MEASUREMENTS.
    repetitions: Repetitions = field(compare=False)
    name: str
    library: str = CUDAKIT

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {**self.copy.axes, MEASUREMENT_AXIS: self.measurement}

    def prepare(self, gpu: Gpu, seed: int) -> PreparedOverlap:
        return PreparedOverlap(gpu, self, seed)


class PreparedOverlap:
    """The buffers of copies and of GEMMs. An execution enqueues the copies, the GEMMs or both.

    In the measurements of _CONCURRENT the other work runs untimed on a second stream. The class implements
    WorkloadWithUntimedWork.
    """

    footprint_bytes = 0
    # A rate of copies and GEMMs together has no meaning, so the figures of the overlap contain the rates.
    bytes_moved = 0
    operations = 0

    def __init__(self, gpu: Gpu, workload: OverlapWorkload, seed: int) -> None:
        self._gpu, self._workload, self._repetitions = gpu, workload, workload.repetitions
        measurement, repetitions = workload.measurement, workload.repetitions
        self._has_copies = measurement in (COPY, BOTH, COPY_DURING_GEMM)
        self._has_gemms = measurement in (GEMM, BOTH, GEMM_DURING_COPY)
        self._is_concurrent = measurement in _CONCURRENT
        with ExitStack() as cleanup:
            self._copy = cleanup.enter_context(closing(workload.copy.prepare(gpu, seed)))
            self._gemm = cleanup.enter_context(closing(workload.gemm.prepare(gpu, seed)))
            self._second_stream = create_stream(gpu, cleanup)
            self._fork_event = create_event(gpu, cleanup)
            self._join_event = create_event(gpu, cleanup)
            self._timed_end = create_event(gpu, cleanup, timing=True)
            self._concurrent_end = create_event(gpu, cleanup, timing=True)
            repetitions.choose(gpu, self._copy, self._gemm)
            # Verification poisons the outputs, which the timed runs have written.
            worst_verification((self._copy.verify(), self._gemm.verify()))
            self._cleanup = cleanup.pop_all()
        # Whether the two events belong to a sample that is not yet checked.
        self._has_unchecked_sample = False
        # Number of samples, and of those in which the concurrent work ended first.
        self._sample_count = self._uncovered_sample_count = 0
        concurrent_count, timed_count = (
            (repetitions.gemms, repetitions.copies)
            if self._has_copies
            else (repetitions.copies, (1 + _CONCURRENT_FACTOR) * repetitions.gemms)
        )
        self._concurrent_factor = _CONCURRENT_FACTOR
        # With more, the work of a sample would not fit in the launch queue.
        self._max_concurrent_factor = max(
            _CONCURRENT_FACTOR, (MAX_QUEUED - timed_count) // concurrent_count
        )

    @property
    def settings(self) -> Mapping[str, Axis]:
        """The library of the GEMM, and the numbers of copies and GEMMs in one execution."""
        return {
            **self._gemm.settings,
            _COPIES: self._repetitions.copies,
            _GEMMS: self._repetitions.gemms,
            _GEMM_FLOP: self._workload.gemm.gemm.operations,
        }

    def rotate(self, set_count: int) -> None:
        """Do nothing: the L2 state is hot."""

    def enqueue(self, stream: Stream, set_index: int) -> None:  # noqa: ARG002 there is one buffer set
        """Enqueue the copies before the GEMMs, as a program that loads its next input does."""
        if not (self._has_gemms and self._has_copies):
            self._enqueue(stream, gemms=self._has_gemms)
            return
        self._fork(stream)
        self._enqueue(stream, gemms=False)
        self._enqueue(self._second_stream, gemms=True)
        self._gpu.record(self._join_event, self._second_stream)
        self._gpu.wait(stream, self._join_event)

    def enqueue_before_sample(self, stream: Stream) -> None:
        """Enqueue untimed GEMMs before timed ones, so that the clock is the same in all measurements.

        Then start the concurrent work on the second stream, after the earlier work of ``stream``.
        """
        self._check_last_sample()
        if self._has_gemms:
            self._enqueue(stream, _CONCURRENT_FACTOR, gemms=True)
        if self._is_concurrent:
            self._fork(stream)
            self._enqueue(self._second_stream, self._concurrent_factor, gemms=not self._has_gemms)
            self._gpu.record(self._concurrent_end, self._second_stream)

    def enqueue_after_sample(self, stream: Stream) -> None:
        """Make later work of ``stream`` wait for the concurrent work."""
        if self._is_concurrent:
            self._gpu.record(self._timed_end, stream)
            self._gpu.wait(stream, self._concurrent_end)
            self._has_unchecked_sample = True

    def _enqueue(self, stream: Stream, factor: int = 1, *, gemms: bool) -> None:
        """Enqueue the GEMMs or the copies of ``factor`` executions."""
        work = self._gemm if gemms else self._copy
        for _ in range(factor * (self._repetitions.gemms if gemms else self._repetitions.copies)):
            work.enqueue(stream, 0)

    def _fork(self, stream: Stream) -> None:
        """Make the second stream wait for the earlier work of a stream."""
        self._gpu.record(self._fork_event, stream)
        self._gpu.wait(self._second_stream, self._fork_event)

    def verify(self) -> Verification:
        """Check the values, and that the concurrent work lasted as long as the timed work.

        It may end first in a tenth of the samples, which have little effect on their median.
        """
        works = ((self._copy, self._has_copies), (self._gemm, self._has_gemms))
        worst = worst_verification(work.verify() for work, is_used in works if is_used)
        self._check_last_sample()
        if not worst.passed or 10 * self._uncovered_sample_count <= self._sample_count:
            return worst
        concurrent, timed = ("GEMMs", "copies") if self._has_copies else ("copies", "GEMMs")
        detail = (
            f"the {concurrent} ended before the {timed} "
            f"in {self._uncovered_sample_count} of {self._sample_count} samples"
        )
        return replace(worst, passed=False, detail=detail)

    def _check_last_sample(self) -> None:
        """Check the last sample, which has finished. If its concurrent work ended first, use more of it."""
        if not self._has_unchecked_sample:
            return
        self._has_unchecked_sample = False
        self._sample_count += 1
        if self._gpu.elapsed(self._timed_end, self._concurrent_end) < 0:
            self._uncovered_sample_count += 1
            self._concurrent_factor = min(
                _CONCURRENT_GROWTH * self._concurrent_factor, self._max_concurrent_factor
            )

    def close(self) -> None:
        self._cleanup.close()


# --- the overlap of each direction and size -----------------------------------------------------------


def copy_overlaps(
    results: Sequence[CaseResult], planned_cases: Sequence[Case]
) -> tuple[CopyOverlap, ...]:
    """Return the overlap of each planned direction and size; cases of other benches are ignored.

    The figures of a case without a result are Unavailable, with the reason.
    """
    results_by_copy: dict[Copy, dict[Axis, CaseResult]] = {
        case.workload.copy: {}
        for case in planned_cases
        if isinstance(case.workload, OverlapWorkload)
    }
    for result in results:
        if MEASUREMENT_AXIS in result.axes:
            copy = Copy(str(result.axes["direction"]), int(result.axes["size_bytes"]))
            results_by_copy.setdefault(copy, {})[result.axes[MEASUREMENT_AXIS]] = result
    return tuple(_overlap(copy, results) for copy, results in results_by_copy.items())


def _overlap(copy: Copy, results: Mapping[Axis, CaseResult]) -> CopyOverlap:
    def time_of(measurement: str) -> _Time:
        if measurement in results:
            return results[measurement].median_s
        reason = f"the measurement {measurement} was not finished"
        if measurement == GEMM_DURING_COPY and is_pageable(copy.direction):
            reason = "a copy of pageable memory blocks the host, which then launches no GEMM"
        elif not results:
            reason = "the run was interrupted before this case"
        return Unavailable(reason)

    def slowdown(alone_s: float, concurrent_s: float) -> float:
        return concurrent_s / alone_s - 1

    copy_s, gemm_s, both_s, copy_during_gemm_s, gemm_during_copy_s = map(time_of, MEASUREMENTS)
    settings = next(iter(results.values())).settings if results else {}
    copies, gemms, flop = (int(settings.get(name, 0)) for name in (_COPIES, _GEMMS, _GEMM_FLOP))
    # A copy within the device reads and writes device memory.
    moved_bytes = copies * copy.size_bytes * (2 if copy.direction == "d2d" else 1)
    return CopyOverlap(
        copy.direction,
        copy.size_bytes,
        copies,
        gemms,
        copy_s,
        gemm_s,
        both_s,
        overlap_share(copy_s, gemm_s, both_s),
        copy_during_gemm_s,
        gemm_during_copy_s,
        _computed(slowdown, copy_s, copy_during_gemm_s),
        _computed(slowdown, gemm_s, gemm_during_copy_s),
        _computed(lambda time_s: moved_bytes / time_s, copy_s),
        _computed(lambda time_s: gemms * flop / time_s, gemm_s),
    )


def overlap_share(*times: _Time) -> _Time:
    """Return the share of the shorter work that runs at the same time as the longer one.

    ``times`` are those of the copies, of the GEMMs and of both. The share is the time that the overlap saves,
    divided by the time of the shorter work, and limited to 0 and 1, as Intel MPI Benchmarks define the
    overlap of communication and computation (IMB-NBC, "Measuring Communication and Computation Overlap").
    """
    return _computed(
        lambda copy_s, gemm_s, both_s: min(
            1.0, max(0.0, (copy_s + gemm_s - both_s) / min(copy_s, gemm_s))
        ),
        *times,
    )


def _computed(function: Callable[..., float], *times: _Time) -> _Time:
    """Return the function of times, or the first time that is Unavailable."""
    missing = next((time_s for time_s in times if isinstance(time_s, Unavailable)), None)
    return function(*times) if missing is None else missing


# --- the report: a sentence per direction, and a table of the times -----------------------------------

_ROUTES: Mapping[str, str] = {
    "h2d": "from pinned host memory to the device",
    "d2h": "from the device to pinned host memory",
    "pageable-h2d": "from pageable host memory to the device",
    "pageable-d2h": "from the device to pageable host memory",
    "d2d": "within the device",
}
# An overlap of at least the first share is good; one below the second share is a problem.
_GOOD_SHARE, _BAD_SHARE = 0.9, 0.5
_PAGEABLE_REASON = (
    "Copies of pageable memory go through a pinned buffer of the driver. Their call blocks the host, so the "
    'GEMM is launched when the copy is over (CUDA Driver API, "API synchronization behavior").'
)
_PIN = "pin the host memory: pin_memory() of a tensor, or cudakit.pin(array) for existing memory"
_CAPTION = (
    ", which take about the same time. Together: from the first start to the last end, on two streams; "
    "the copies are launched first. Overlap = (copy + GEMM - together) / the shorter of copy and GEMM. Copy "
    "slowdown: time of the copies while GEMMs run all the time, compared with the time alone. GEMM slowdown: "
    "the same of the GEMMs while copies run"
)
_PAGEABLE_CAPTION = (
    '; "-" for pageable copies, which block the host, so that no GEMM can be launched'
)


def overlap_answers(overlaps: Sequence[CopyOverlap]) -> Iterator[Node]:
    """Yield a sentence per direction and size, then the table; nothing without overlaps."""
    if not overlaps:
        return
    has_several_sizes = len({overlap.size_bytes for overlap in overlaps}) > 1
    for overlap in overlaps:
        size = f" of {format_bytes(overlap.size_bytes)}" if has_several_sizes else ""
        yield _answer(overlap, f"A copy{size} {_ROUTES[overlap.direction]}")
    if any(map(_is_blocked, overlaps)):
        yield Note("info", _PAGEABLE_REASON, (_PIN,))
    yield _table(overlaps)


def _answer(overlap: CopyOverlap, copy_text: str) -> Note:
    share = overlap.overlap
    if isinstance(share, Unavailable):
        return Note("error", f"{copy_text}: the overlap with a GEMM is unknown: {share.reason}.")
    text = f"{copy_text} overlaps {share:.0%} with a GEMM"
    if _is_blocked(overlap):
        return Note("warn", f"{text} that is launched after it.")
    # A change below 0.5% is no change.
    percents = {
        name: round(100 * slowdown)
        for name, slowdown in (("GEMM", overlap.gemm_slowdown), ("copy", overlap.copy_slowdown))
        if not isinstance(slowdown, Unavailable)
    }
    changes = [
        f"the {name} {'' if i else 'runs '}"
        + (f"{abs(it)}% {'slower' if it > 0 else 'faster'}" if it else "at full speed")
        for i, (name, it) in enumerate(percents.items())
    ]
    if len(percents) == 2 and not any(percents.values()):
        changes = ["both run at full speed"]
    text = "; ".join([text, ", ".join(changes)]) if changes else text
    return Note(
        "ok" if share >= _GOOD_SHARE else "info" if share >= _BAD_SHARE else "warn", f"{text}."
    )


def _is_blocked(overlap: CopyOverlap) -> bool:
    """Return whether pageable memory prevents the overlap."""
    share = overlap.overlap
    is_low = not isinstance(share, Unavailable) and share < _BAD_SHARE
    return is_low and is_pageable(overlap.direction)


def _table(overlaps: Sequence[CopyOverlap]) -> Table:
    titles = ("size", "copy", "GEMM", "together", "overlap", "copy slowdown", "GEMM slowdown")
    optional_titles = ("copy rate", "GEMM rate", "copies/GEMMs")

    def slowdown(value: _Time) -> Value:
        return Text("-") if isinstance(value, Unavailable) else Ratio(value)

    def count_range(counts: Sequence[int]) -> str:
        measured = [count for count in counts if count] or [0]
        return text_range(str(min(measured)), str(max(measured)))

    rows = tuple(
        (
            Text(overlap.direction),
            Bytes(overlap.size_bytes),
            cell(Seconds, overlap.copy_s),
            cell(Seconds, overlap.gemm_s),
            cell(Seconds, overlap.both_s),
            cell(Ratio, overlap.overlap),
            slowdown(overlap.copy_slowdown),
            slowdown(overlap.gemm_slowdown),
            cell(lambda rate: Rate(rate, "B"), overlap.copy_bytes_per_s),
            cell(lambda rate: Rate(rate, "FLOP"), overlap.gemm_flop_per_s),
            Text(f"{overlap.copies}/{overlap.gemms}" if overlap.copies else "-"),
        )
        for overlap in overlaps
    )
    has_pageable = any(is_pageable(overlap.direction) for overlap in overlaps)
    return Table(
        (
            Column("direction", "text"),
            *(Column(title, "number") for title in titles),
            *(Column(title, "number", is_optional=True) for title in optional_titles),
        ),
        rows,
        f"Copy, GEMM: time alone of {count_range([it.copies for it in overlaps])} copies and "
        f"{count_range([it.gemms for it in overlaps])} GEMMs{_CAPTION}"
        f"{_PAGEABLE_CAPTION if has_pageable else ''}.",
    )


def _table_rows(result: BenchResult) -> Sequence[CaseResult]:
    """Return a case per row of the table, with the defects of all its measurements."""
    groups: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in result.results:
        axes = {name: value for name, value in case.axes.items() if name != MEASUREMENT_AXIS}
        groups.setdefault(tuple(axes.values()), []).append(replace(case, axes=axes))
    rows: list[CaseResult] = []
    for cases in groups.values():
        withheld = [case for case in cases if isinstance(case.median_s, Unavailable)]
        case = (withheld or sorted(cases, key=lambda case: case.converged))[0]
        summaries = [it.statistics for it in cases if isinstance(it.statistics, Summary)]
        if isinstance(case.statistics, Summary):
            trend, bimodal = any(it.trend for it in summaries), any(it.bimodal for it in summaries)
            case = replace(case, statistics=replace(case.statistics, trend=trend, bimodal=bimodal))
        rows.append(replace(case, verified=all(it.verified for it in cases)))
    return rows


OverlapSpec.words = Words(
    timing=lambda _: "each sample has all copies, all GEMMs, or both, timed by CUDA events",
    answer=lambda result: overlap_answers(result.overlaps),
    rows=_table_rows,
)
