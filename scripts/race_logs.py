"""Small logs of recorded programs, without data that differs between machines and runs.

Call stacks contain only frames of the program, and the string table only strings that records refer to. Times
are removed, and threads are numbered from 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cudakit.gpu.compile import demangle
from cudakit.sanitize.detector import RaceDetector
from cudakit.sanitize.findings import RaceCollector
from cudakit.sanitize.races import SanitizeResult
from cudakit.stacks import Stack
from cudakit.trace.kinds import EventKind
from cudakit.trace.run_log import LogReader, LogWriter, Outcome
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import Records, view

MAX_LOG_BYTES = 200_000  # The maximum size of a log in the repository.

# The fields of records that contain indices of the string table, by kind of record.
_STRING_FIELDS = {
    EventKind.LAUNCH: ("name",),
    EventKind.GRAPH_NODE: ("name",),
    EventKind.RANGE_PUSH: ("name", "domain"),
    EventKind.RANGE_POP: ("domain",),
    EventKind.MARK: ("name", "domain"),
    EventKind.GAP: ("reason",),
    EventKind.COMMUNICATOR: ("name",),
    EventKind.COLLECTIVE: ("name",),
}


def load(path: Path) -> list[Batch]:
    """Read a log; return each of its traces as one batch."""
    traces: dict[tuple[int, int], list[Batch]] = {}
    with LogReader(path) as log:
        for batch in log.batches():
            traces.setdefault((batch.process, batch.trace_number), []).append(batch)
    return [
        replace(batches[-1], records=np.concatenate([batch.records for batch in batches]))
        for batches in traces.values()
    ]


def save(path: Path, traces: Iterable[Batch]) -> None:
    """Write traces to a log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        log = LogWriter(file)
        for trace in traces:
            log.add(trace)
        log.finish(Outcome())


def save_small_log(
    log: Path, target: Path, *, program: str, max_bytes: int = MAX_LOG_BYTES
) -> None:
    """Write a small copy of a log of a program, unless the copy is larger than ``max_bytes``."""
    traces = enumerate(load(log), start=1)
    save(target, (_small_trace(trace, process, program) for process, trace in traces))
    if target.stat().st_size > max_bytes:
        target.unlink()


def analyze(traces: Sequence[Batch]) -> SanitizeResult:
    """Return the report about traces, each of which counts as a separate process."""
    detector, report = RaceDetector(), RaceCollector(demangle=demangle)
    for process, trace in enumerate(traces, start=1):
        detector.feed(replace(trace, process=process), report)
    detector.finish(report)
    return detector.result(report, exit_status=0)


def _small_trace(trace: Batch, process: int, program: str) -> Batch:
    records = trace.records.copy()
    records["time_ns"] = 0
    records["thread"] = np.unique(records["thread"], return_inverse=True)[1] + 1
    string_indices = _string_indices(records)
    strings = [text if index in string_indices else "" for index, text in enumerate(trace.strings)]
    stacks = [_program_frames(stack, program) for stack in trace.stacks]
    return replace(trace, process=process, records=records, strings=strings, stacks=stacks)


def _program_frames(stack: Stack, program: str) -> Stack:
    """Return the frames of the program, with the file name only."""
    return tuple(
        replace(frame, filename=program) for frame in stack if Path(frame.filename).name == program
    )


def _string_indices(records: Records) -> set[int]:
    return {
        index
        for kind, fields in _STRING_FIELDS.items()
        for index in _indices_in_fields(records, kind, fields)
    }


def _indices_in_fields(records: Records, kind: EventKind, fields: Sequence[str]) -> Iterator[int]:
    records_of_kind = view(records[records["kind"] == kind], kind)
    for field in fields:
        yield from np.unique(records_of_kind[field]).tolist()
