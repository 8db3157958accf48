"""Several processes at once: an engine for each, and one report of what they find."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from cudakit.core.sanitize.engine import Engine
from cudakit.core.sanitize.races import Confidence, Coverage, Race
from cudakit.core.sanitize.report import Report
from cudakit.core.sanitize.result import SanitizeResult
from cudakit.trace.kinds import Kind, StreamFlag
from cudakit.trace.layout import Records, view
from cudakit.trace.spool import Batch


class Watch:
    """Hands what processes tell to their engines; what is found goes to the report of the moment."""

    def __init__(self, *, strict_threads: bool = False, report_possible: bool = False) -> None:
        self._new_engine = partial(
            Engine, strict_threads=strict_threads, report_possible=report_possible
        )
        self._chains: dict[tuple[int, int], _Chain] = {}

    def feed(self, batch: Batch, report: Report) -> list[Race]:
        """Take what came; return the races in it that count, suppressed ones included."""
        chain = self._chain(batch)
        chain.streams.update(_created(batch.records))
        races = chain.engine.feed(batch.records, batch.strings)
        report.add(
            batch.process,
            races,
            stacks=batch.stacks,
            streams=chain.streams,
            chain=batch.chain,
        )
        return [race for race in races if counts(race.confidence)]

    def result(
        self,
        report: Report,
        *,
        exit_status: int | None = None,
        stopped: bool = False,
        notes: Sequence[str] = (),
    ) -> SanitizeResult:
        """Make the Result of a report, with the coverage of all that was fed so far."""
        return report.result(
            exit_status=exit_status,
            coverage=self._coverage(),
            gaps=[chain.engine.gaps for chain in self._chains.values()],
            simulated=any(chain.simulated for chain in self._chains.values()),
            stopped=stopped,
            notes=notes,
        )

    def _coverage(self) -> dict[int, Coverage]:
        total: defaultdict[int, Coverage] = defaultdict(Coverage)
        for (process, _), chain in self._chains.items():
            total[process] += chain.engine.coverage
        return total

    def _chain(self, batch: Batch) -> _Chain:
        key = batch.process, batch.chain
        if key not in self._chains:
            self._chains[key] = _Chain(self._new_engine(), batch.simulated)
        return self._chains[key]


@dataclass(frozen=True, slots=True)
class _Chain:
    """What is known of one trace."""

    engine: Engine
    simulated: bool
    streams: dict[int, StreamFlag] = field(default_factory=dict)


def counts(confidence: Confidence) -> bool:
    """Say whether a race of this confidence is a finding: it fails a run, a test, a block."""
    return confidence is not Confidence.POSSIBLE


def _created(records: Records) -> dict[int, StreamFlag]:
    created = view(records[np.asarray(records["kind"]) == Kind.STREAM_CREATE], Kind.STREAM_CREATE)
    return {
        stream: StreamFlag(flag)
        for stream, flag in zip(created["stream"].tolist(), created["flag"].tolist(), strict=True)
    }
