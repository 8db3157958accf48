"""Monitor a running program: collect its races, and the reasons why parts of it are not recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cudakit.core.sanitize.detector import RaceDetector
from cudakit.core.sanitize.races import Confidence
from cudakit.core.sanitize.report import Report, findings
from cudakit.core.sanitize.suppressions import suppressions
from cudakit.gpu.demangle import demangle
from cudakit.run.protocol import About, Notice

if TYPE_CHECKING:
    from cudakit.core.sanitize.result import SanitizeResult
    from cudakit.trace.spool import Batch


class Monitor:
    """Consumes the records and messages of a program's processes; ``warn`` prints a warning at once."""

    def __init__(
        self,
        *,
        show: Confidence,
        suppress: Sequence[str],
        strict_threads: bool,
        stop_on_first: bool,
        warn: Callable[[str], None],
    ) -> None:
        self.snapshots: list[str] = []
        self.stopped = False
        self._enough = False
        self._failure: Exception | None = None
        self._notes: Counter[str] = Counter()
        self._stop_on_first = stop_on_first
        self._warn = warn
        self._report = Report(show=show, suppressions=suppressions(suppress), demangle=demangle)
        possible = show is Confidence.POSSIBLE
        self._detector = RaceDetector(strict_threads=strict_threads, report_possible=possible)

    def consume(self, batch: Batch) -> bool:
        """Consume a batch; return True to stop the program."""
        if self._failure is None:
            try:
                self._feed(batch)
            except Exception as failure:  # noqa: BLE001 must not disturb the program
                self._failure = failure
        return self._enough

    def stopping(self) -> None:
        """Record that the program was still running when it was stopped."""
        self.stopped = True

    def notify(self, notice: Notice) -> None:
        """Consume a message of an agent."""
        if notice.about is About.SNAPSHOTS:
            self.snapshots.append(notice.text)
        else:
            self.add_note(notice.text)

    def add_note(self, reason: str) -> None:
        """Add a reason why part of the program is not checked, and print it the first time."""
        if reason not in self._notes:
            self._warn(reason)
        self._notes[reason] += 1

    def finish(self) -> None:
        """Analyze the records that were held back, as no more will come."""
        if self._failure is None:
            self._detector.finish(self._report)

    def result(self, *, exit_status: int | None = None) -> SanitizeResult:
        """Return the result so far. Raises the first exception of ``consume``."""
        if self._failure:
            raise self._failure
        notes = [_with_count(reason, count) for reason, count in self._notes.items()]
        return self._detector.result(
            self._report, exit_status=exit_status, stopped=self.stopped, notes=notes
        )

    def _feed(self, batch: Batch) -> None:
        found = self._detector.feed(batch, self._report)
        # A race may be suppressed, which only the Result shows.
        if found and self._stop_on_first and not self._enough:
            self._enough = bool(findings(self.result()))


def _with_count(reason: str, count: int) -> str:
    return f"{reason} ({count} processes)" if count > 1 else reason
