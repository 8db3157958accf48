"""Races between streams in a block of this process: ``cudakit run --sanitize``, from the inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, TypeAlias

from cudakit.core.sanitize.detector import RaceDetector
from cudakit.core.sanitize.races import Confidence
from cudakit.core.sanitize.report import Report, findings, message
from cudakit.core.sanitize.result import FoundRace, SanitizeResult
from cudakit.core.sanitize.suppressions import suppressions
from cudakit.errors import RaceError, UsageError
from cudakit.gpu.capture.recording import begin
from cudakit.gpu.demangle import demangle
from cudakit.trace.spool import Batch

Which: TypeAlias = Literal["auto", "sim"]
Accesses: TypeAlias = Literal["exact", "arguments"]


class Sanitized:
    """What was found in a block so far: inside it all that was enqueued by now, after it all of it."""

    def __init__(self, session: _Session, report: Report) -> None:
        self._session = session
        self._report = report
        self._final: SanitizeResult | None = None

    @property
    def result(self) -> SanitizeResult:
        """What ``cudakit run --sanitize -o FILE.json`` writes, as an object."""
        return self._final or self._session.result(self._report)

    @property
    def races(self) -> tuple[FoundRace, ...]:
        """The races that were found, the surest first."""
        return self.result.races

    def close(self) -> None:
        """Keep what was found: the block is over."""
        self._final = self._session.result(self._report)


@contextmanager
def sanitize(
    *,
    raise_on_race: bool = False,
    suppress: Iterable[str] = (),
    show: Literal["likely", "possible"] = "likely",
    accesses: Accesses | None = None,
    gpu: Which = "auto",
) -> Iterator[Sanitized]:
    """Find races between streams in what a block enqueues on GPUs, from all threads of this process.

    Enter the first block before CUDA is used: to import torch is early enough, to make a tensor on the
    GPU is too late. From then on the process stays recorded, and later blocks know what came before them.
    With ``raise_on_race`` a race raises RaceError at the end of the block, with the report as its message.
    ``suppress``, ``show`` and ``accesses`` mean what the options of ``cudakit run`` mean; how accesses are
    known is settled by the first block. Simulated devices that are opened inside the block are watched too,
    and with ``gpu="sim"`` nothing else is. Where accesses are exact, to ask for races waits for the GPU, as
    the end of the block does: what launches did is known when they are done.

    Raises UsageError where CUDA is in use already, inside another block, and under ``cudakit run
    --sanitize``; EnvironmentUnusable where CUDA cannot be recorded, or not with the accesses wanted.

    >>> with cudakit.sanitize(gpu="sim") as report:
    ...     pass
    >>> report.races
    ()
    """
    report = Report(show=Confidence(show), suppressions=suppressions(suppress), demangle=demangle)
    session = _session(gpu, accesses)
    session.enter(report)
    sanitized = Sanitized(session, report)
    try:
        yield sanitized
    finally:
        sanitized.close()
        session.leave()
    if raise_on_race and (races := findings(sanitized.result)):
        raise RaceError(message(races))


class _Session:
    """The recording of this process, and the block that it is in."""

    def __init__(self, gpu: Which, accesses: Accesses | None) -> None:
        self._detector = RaceDetector()
        self._outside = self._report = Report()
        self._recording = begin(self._take, gpu=gpu, accesses=accesses)

    def enter(self, report: Report) -> None:
        if self._report is not self._outside:
            raise UsageError(
                "a block of cudakit.sanitize() is inside another one",
                hint="the outer one finds the races of both: leave the inner one out",
            )
        with self._recording.synchronized():
            self._detector.finish(self._report)
            self._report = report
        self._recording.record_simulated(wanted=True)

    def leave(self) -> None:
        self._recording.record_simulated(wanted=False)
        self._report = self._outside

    def result(self, report: Report) -> SanitizeResult:
        with self._recording.synchronized():
            self._detector.finish(self._report)
            return self._detector.result(report, notes=self._recording.cuda.notes)

    def must_have(self, accesses: Accesses | None) -> None:
        """Raise UsageError where accesses are known in another way than is wanted."""
        had = self._recording.cuda.accesses
        if accesses and had and accesses != had:
            raise UsageError(
                f"this process is recorded with accesses={had!r}, since its first block",
                hint="a process is recorded in one way: say so in its first block",
            )

    def _take(self, batch: Batch) -> None:
        self._detector.feed(batch, self._report)


def _session(gpu: Which, accesses: Accesses | None) -> _Session:
    """Return what is known of this process, which can be recorded once: it serves every block."""
    sessions = _sessions()
    if gpu not in sessions:
        sessions[gpu] = _Session(gpu, accesses)
    sessions[gpu].must_have(accesses)
    return sessions[gpu]


@cache
def _sessions() -> dict[Which, _Session]:
    return {}
