"""Detect races in the traces of several processes, with one engine per trace and one report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np

from cudakit.errors import InputError
from cudakit.sanitize.different_calls import RankComparison
from cudakit.sanitize.engine import Engine
from cudakit.sanitize.findings import RaceCollector
from cudakit.sanitize.owners import StreamUse
from cudakit.sanitize.races import Confidence, Coverage, Race, SanitizeResult
from cudakit.sanitize.records import GIVEN_UP, NEVER_READ, ReorderBuffer
from cudakit.sanitize.templates import (
    OUTDATED_TEMPLATE,
    UNKNOWN_TEMPLATE,
    TemplateAccesses,
)
from cudakit.trace.kinds import EventKind, StreamFlag
from cudakit.trace.run_log import LogReader, Outcome, TruncatedLogError
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import Records, take_records, view

# Kinds of events that only a log of run --profile has.
_PROFILE_KINDS = (EventKind.KERNEL_RUN, EventKind.COPY_RUN, EventKind.FILL_RUN)
# The recorder writes this gap: recorder/model/stream_order.c. All work is analyzed nevertheless.
_TOO_MANY_STREAMS = "work on more than 128 streams at the same time"
_COST_OF_STREAMS = (
    "more than 128 streams had unfinished work at the same time; all launches on the other"
    " streams were recorded, which takes time, but misses no race"
)


class RaceDetector:
    """Passes the records of each trace to its engine, and the races to a report."""

    def __init__(self, *, strict_threads: bool = False, report_possible: bool = False) -> None:
        self._new_engine = partial(
            Engine, strict_threads=strict_threads, report_possible=report_possible
        )
        self._strict_threads = strict_threads
        self._traces: dict[tuple[int, int], _TraceAnalysis] = {}
        self._ranks = RankComparison()

    def feed(self, batch: Batch, report: RaceCollector) -> list[Race]:
        """Analyze a batch; return its races that are findings, including suppressed races."""
        self._ranks.feed(batch)
        trace_key = batch.process, batch.trace_number
        if trace_key not in self._traces:
            self._traces[trace_key] = _TraceAnalysis(self._new_engine(), batch)
        analysis = self._traces[trace_key]
        analysis.last_batch = batch
        is_creation = batch.records["kind"] == EventKind.STREAM_CREATE
        created = view(batch.records[is_creation], EventKind.STREAM_CREATE)
        flags = map(StreamFlag, created["flag"].tolist())
        analysis.flag_by_stream.update(zip(created["stream"].tolist(), flags, strict=True))
        return analysis.analyze(analysis.reorder_buffer.feed(batch.records), report)

    def finish(self, report: RaceCollector) -> dict[tuple[int, int], list[Race]]:
        """Analyze the records that the reorder buffers hold, without waiting for accesses of their launches.

        Returns the races that are findings, by process and number of the trace.
        """
        self._ranks.finish()
        return {
            trace: analysis.analyze(analysis.reorder_buffer.flush(), report)
            for trace, analysis in self._traces.items()
            if analysis.reorder_buffer.held_count
        }

    def result(
        self,
        report: RaceCollector,
        *,
        exit_status: int | None = None,
        stopped: bool = False,
        notes: Sequence[str] = (),
        incomplete: Sequence[str] = (),
        no_gpu_work: str | None = None,
    ) -> SanitizeResult:
        """Return the result of a report, with the coverage of all batches so far."""
        coverage: defaultdict[int, Coverage] = defaultdict(Coverage)
        for (process, _), analysis in self._traces.items():
            coverage[process] += analysis.engine.coverage
        costs: tuple[str, ...] = ()
        if any(_TOO_MANY_STREAMS in trace.engine.gap_counts for trace in self._traces.values()):
            costs = (_COST_OF_STREAMS,)
        return report.result(
            exit_status=exit_status,
            coverage=coverage,
            gaps=[gaps for analysis in self._traces.values() for gaps in analysis.gaps()],
            simulated=any(analysis.last_batch.simulated for analysis in self._traces.values()),
            stopped=stopped,
            notes=(*notes, *costs),
            incomplete=(*incomplete, *self._unrecorded_launches()),
            no_gpu_work=no_gpu_work,
            different_calls=tuple(self._ranks.differences()),
            ranks=self._ranks.rank_by_process(),
        )

    def _unrecorded_launches(self) -> Iterator[str]:
        """Yield a sentence for each reason why races with launches that were not recorded may be missing."""
        engines = [analysis.engine for analysis in self._traces.values()]
        unrecorded_count = sum(engine.coverage.launches_from_template for engine in engines)
        if self._strict_threads and unrecorded_count:
            yield (
                f"{unrecorded_count:,} kernel launches were not recorded, because all host threads counted"
                " as one; record the program with: cudakit run --sanitize --host-threads strict"
            )
        outdated_count = sum(engine.gap_counts[OUTDATED_TEMPLATE] for engine in engines)
        if outdated_count:
            yield (
                "kernels next to unordered work accessed other bytes than their earlier launches, which were"
                f" not all recorded ({outdated_count:,} times); rerun with --accesses exact"
            )

    @property
    def has_initialized_cuda(self) -> bool:
        """Whether a process used CUDA on a real device."""
        return any(not analysis.last_batch.simulated for analysis in self._traces.values())

    @property
    def has_recorded_gpu_work(self) -> bool:
        """Whether work of a real device was recorded."""
        return any(
            analysis.engine.coverage.has_work
            for analysis in self._traces.values()
            if not analysis.last_batch.simulated
        )

    @property
    def has_recorded_work(self) -> bool:
        """Whether work of a real or a simulated device was recorded."""
        return any(analysis.engine.coverage.has_work for analysis in self._traces.values())


@dataclass(slots=True)
class _TraceAnalysis:
    """The analysis of one trace."""

    engine: Engine
    last_batch: Batch  # the last batch, whose string and stack tables are the most complete
    reorder_buffer: ReorderBuffer = field(default_factory=ReorderBuffer)
    templates: TemplateAccesses = field(default_factory=TemplateAccesses)
    flag_by_stream: dict[int, StreamFlag] = field(default_factory=dict)
    stream_use: StreamUse = field(default_factory=StreamUse)

    def analyze(self, records: Records, report: RaceCollector) -> list[Race]:
        """Add the races in reordered records to a report; return the races that are findings."""
        is_destruction = records["kind"] == EventKind.GRAPH_DESTROY
        destroyed_graphs = view(records[is_destruction], EventKind.GRAPH_DESTROY)
        if len(destroyed_graphs):
            records = take_records(records, ~is_destruction)
        self.stream_use.feed(records, self.last_batch.stacks)
        records = self.templates.insert(records, self.engine.coverage)
        races = self.engine.feed(
            records,
            self.last_batch.strings,
            self.templates.possible_accesses,
            self.templates.graph_rows,
        )
        batch = self.last_batch
        report.add(
            batch.process,
            races,
            self.engine.take_unverified(),
            stacks=batch.stacks,
            flag_by_stream=self.flag_by_stream,
            trace_number=batch.trace_number,
            stream_use=self.stream_use,
        )
        self.engine.forget_graphs(destroyed_graphs)
        self.templates.forget_graphs(destroyed_graphs)
        return [race for race in races if race.confidence.is_finding]

    def gaps(self) -> Iterator[Mapping[str, int]]:
        """Yield the events that were not analyzed, with their counts."""
        counts = self.engine.gap_counts
        yield {reason: counts[reason] for reason in counts if reason != _TOO_MANY_STREAMS}
        own_counts = {
            NEVER_READ: self.reorder_buffer.never_read_count,
            GIVEN_UP: self.reorder_buffer.given_up_count,
            UNKNOWN_TEMPLATE: self.templates.unknown_count,
        }
        yield {reason: count for reason, count in own_counts.items() if count}


def analyze_log(
    log: LogReader,
    report: RaceCollector,
    *,
    min_confidence: Confidence = Confidence.LIKELY,
    strict_threads: bool = False,
    progress: Callable[[str, float], None] = lambda _stage, _fraction: None,
) -> SanitizeResult:
    """Find the races in a log, with the result of the recorded run.

    The result of a truncated log is incomplete. Raises InputError if the log is damaged, is truncated before
    its first events, or is a log of run --profile.
    """
    report_possible = min_confidence is Confidence.POSSIBLE
    detector = RaceDetector(strict_threads=strict_threads, report_possible=report_possible)
    has_profile = False
    truncation: tuple[str, ...] = ()
    try:
        for batch in log.batches():
            detector.feed(batch, report)
            has_profile |= bool(np.isin(batch.records["kind"], _PROFILE_KINDS).any())
            progress("analyzing the log", log.fraction)
    except TruncatedLogError as error:
        if not error.sentence:
            raise
        truncation = (error.sentence,)
    detector.finish(report)
    if has_profile and not detector.has_recorded_work:
        raise InputError(
            f"{log.path} was written by run --profile, so it has no accesses to check for races",
            hint=f"show its profile with: cudakit profile {log.path}",
        )
    outcome = Outcome(incomplete=truncation) if truncation else log.outcome
    return detector.result(report, **asdict(outcome))
