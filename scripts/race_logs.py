"""Small logs of recorded programs, without data that differs between machines and runs.

Call stacks keep only frames of the program itself, the string table only strings that records refer to.
Times are removed, and threads are numbered from 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cudakit.core.sanitize.detector import RaceDetector
from cudakit.core.sanitize.report import Report
from cudakit.core.sanitize.result import SanitizeResult
from cudakit.gpu.demangle import demangle
from cudakit.trace.kinds import EventKind
from cudakit.trace.layout import Records, view
from cudakit.trace.run_log import LogReader, LogWriter, Outcome
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import Stack

MOST_BYTES = 200_000  # of a log in the repository

# The fields of records that refer to the string table.
_NAMES = {
    EventKind.LAUNCH: ("name",),
    EventKind.GRAPH_NODE: ("name",),
    EventKind.RANGE_PUSH: ("name", "domain"),
    EventKind.RANGE_POP: ("domain",),
    EventKind.MARK: ("name", "domain"),
    EventKind.GAP: ("what",),
}


def load(path: Path) -> list[Batch]:
    """Read a log; return each of its traces as one batch."""
    traces: dict[tuple[int, int], list[Batch]] = {}
    with LogReader(path) as log:
        for batch in log.batches():
            traces.setdefault((batch.process, batch.chain), []).append(batch)
    return [
        replace(batches[-1], records=np.concatenate([batch.records for batch in batches]))
        for batches in traces.values()
    ]


def save(path: Path, traces: Iterable[Batch]) -> None:
    """Write a log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        log = LogWriter(file)
        for trace in traces:
            log.add(trace)
        log.finish(Outcome())


def keep(log: Path, target: Path, *, program: str, most_bytes: int = MOST_BYTES) -> None:
    """Write a small log of a program, unless it is too large."""
    save(target, (_small(trace, program) for trace in load(log)))
    if target.stat().st_size > most_bytes:
        target.unlink()


def analyzed(traces: Sequence[Batch]) -> SanitizeResult:
    """Find the races in traces, each of a process of its own."""
    detector, report = RaceDetector(), Report(demangle=demangle)
    for process, trace in enumerate(traces, start=1):
        detector.feed(replace(trace, process=process), report)
    detector.finish(report)
    return detector.result(report, exit_status=0)


def _small(trace: Batch, program: str) -> Batch:
    records = trace.records.copy()
    records["time_ns"] = 0
    records["thread"] = np.unique(records["thread"], return_inverse=True)[1] + 1
    named = _named(records)
    strings = [text if number in named else "" for number, text in enumerate(trace.strings)]
    stacks = [_own(stack, program) for stack in trace.stacks]
    return replace(trace, process=1, records=records, strings=strings, stacks=stacks)


def _own(stack: Stack, program: str) -> Stack:
    """Return the frames of the program, without its directory."""
    return tuple(
        frame._replace(file=program) for frame in stack if Path(frame.file).name == program
    )


def _named(records: Records) -> set[int]:
    return {number for kind, fields in _NAMES.items() for number in _numbers(records, kind, fields)}


def _numbers(records: Records, kind: EventKind, fields: Sequence[str]) -> Iterator[int]:
    some = view(records[records["kind"] == kind], kind)
    for field in fields:
        yield from np.unique(some[field]).tolist()
