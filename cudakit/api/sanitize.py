"""Find races between streams in a block of this process, as ``cudakit run --sanitize`` does in a program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, TypeAlias

from cudakit.errors import RaceError, UsageError
from cudakit.gpu.compile import demangle
from cudakit.record.recording import begin
from cudakit.sanitize.baseline import suppressions
from cudakit.sanitize.detector import RaceDetector
from cudakit.sanitize.findings import RaceCollector, findings, message
from cudakit.sanitize.races import Confidence, FoundRace, SanitizeResult
from cudakit.trace.spool import Batch

GpuChoice: TypeAlias = Literal["auto", "sim"]
Accesses: TypeAlias = Literal["auto", "exact", "arguments"]


class Sanitized:
    """The result of a ``with`` block. Inside the block, the result covers the work so far."""

    def __init__(self, session: _Session, report: RaceCollector) -> None:
        self._session = session
        self._report = report
        self._final_result: SanitizeResult | None = None

    @property
    def result(self) -> SanitizeResult:
        """The result that ``cudakit run --sanitize -o FILE.json`` writes."""
        return self._final_result or self._session.result(self._report)

    @property
    def races(self) -> tuple[FoundRace, ...]:
        """The races of the program, in order of decreasing confidence.

        ``result.races`` also has the races inside libraries.
        """
        result = self.result
        return tuple(filter(result.is_counted, result.races))

    def close(self) -> None:
        """Store the result when the ``with`` block has ended."""
        self._final_result = self._session.result(self._report)


@contextmanager
def sanitize(
    *,
    raise_on_race: bool = False,
    suppress: Iterable[str] = (),
    show: Literal["likely", "possible"] = "likely",
    accesses: Accesses | None = None,
    gpu: GpuChoice = "auto",
) -> Iterator[Sanitized]:
    """Find races between streams in the GPU work that all threads of this process enqueue in a block.

    Enter the first block before CUDA is initialized: the program may import torch before the block, but may
    not create a CUDA tensor. The process is recorded from the first block until the process ends, so that
    later blocks also find races with earlier work. With ``raise_on_race``, a race or a lost event raises
    RaceError at the end of the block; the message is the report. ``suppress``, ``show`` and ``accesses`` are
    options of ``cudakit run``; the first block sets ``accesses`` for the whole process. Simulated devices
    that are opened in the block are recorded, too; with ``gpu="sim"``, real devices are not. Unless
    ``accesses`` is "arguments", reading ``races`` or ``result`` and leaving the block wait for the GPU.

    Raises UsageError if CUDA is already initialized, inside another block, and under ``cudakit run
    --sanitize``; EnvironmentUnusable if CUDA cannot be recorded, or not with the requested accesses.

    >>> with cudakit.sanitize(gpu="sim") as report:
    ...     pass
    >>> report.races
    ()
    """
    patterns = suppressions(suppress, origin="suppress")
    report = RaceCollector(
        min_confidence=Confidence(show), suppressions=patterns, demangle=demangle
    )
    session = _session(gpu, accesses)
    session.enter_block(report)
    sanitized = Sanitized(session, report)
    try:
        yield sanitized
    finally:
        sanitized.close()
        session.leave_block()
    result = sanitized.result
    other_findings = [
        *result.incomplete,
        *(calls.sentence for calls in result.different_calls),
        *(f"{pair.sentence}: {pair.hint}" for pair in result.unverified),
    ]
    if raise_on_race and (findings(result) or other_findings):
        raise RaceError("\n\n".join([*other_findings, message(findings(result))]))


class _Session:
    """The recording of this process, with the report of the current ``with`` block."""

    def __init__(self, gpu: GpuChoice, accesses: Accesses | None) -> None:
        self._detector = RaceDetector()
        self._report_outside_blocks = self._report = RaceCollector()
        self._recording = begin(self._feed, gpu=gpu, accesses=accesses)

    def enter_block(self, report: RaceCollector) -> None:
        if self._report is not self._report_outside_blocks:
            raise UsageError(
                "cudakit.sanitize() cannot be nested",
                hint="remove the inner block: the outer one reports the races of both",
            )
        with self._recording.synchronize_and_drain():
            self._detector.finish(self._report)
            self._report = report
        self._recording.record_simulated(enabled=True)

    def leave_block(self) -> None:
        self._recording.record_simulated(enabled=False)
        self._report = self._report_outside_blocks

    def result(self, report: RaceCollector) -> SanitizeResult:
        with self._recording.synchronize_and_drain():
            self._detector.finish(self._report)
            recording = self._recording
            return self._detector.result(
                report, notes=recording.cuda.notes, incomplete=recording.incomplete
            )

    def _feed(self, batch: Batch) -> None:
        self._detector.feed(batch, self._report)


def _session(gpu: GpuChoice, accesses: Accesses | None) -> _Session:
    """Return the session for a choice of GPU.

    All ``with`` blocks share it, because a process can be recorded only once.
    """
    sessions = _sessions()
    if gpu not in sessions:
        sessions[gpu] = _Session(gpu, accesses)
    recorded_accesses = sessions[gpu]._recording.cuda.accesses
    if accesses and recorded_accesses and accesses != recorded_accesses:
        raise UsageError(
            f"this process is already recorded with accesses={recorded_accesses!r}",
            hint="set accesses in the first block: it cannot change within a process",
        )
    return sessions[gpu]


@cache
def _sessions() -> dict[GpuChoice, _Session]:
    return {}
