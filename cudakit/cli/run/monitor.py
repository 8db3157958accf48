"""What is known of a program that runs: its races so far, and what could not be watched."""

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
    """Takes what the processes of a program record and say; ``warn`` is told at once what goes wrong."""

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
        self._failure: Exception | None = None
        self._notes: Counter[str] = Counter()
        self._stop_on_first = stop_on_first
        self._warn = warn
        self._report = Report(show=show, suppressions=suppressions(suppress), demangle=demangle)
        possible = show is Confidence.POSSIBLE
        self._detector = RaceDetector(strict_threads=strict_threads, report_possible=possible)

    def consume(self, batch: Batch) -> bool:
        """Take what came; True stops the program."""
        if self._failure is None:
            try:
                self._feed(batch)
            except Exception as failure:  # noqa: BLE001 the program does not suffer from it
                self._failure = failure
        return self.stopped

    def notify(self, notice: Notice) -> None:
        """Take what an agent has to say."""
        if notice.about is About.SNAPSHOTS:
            self.snapshots.append(notice.text)
        else:
            self.unwatched(notice.text)

    def unwatched(self, reason: str) -> None:
        """Take why something is not watched; the same reason is said once."""
        if reason not in self._notes:
            self._warn(reason)
        self._notes[reason] += 1

    def finish(self) -> None:
        """Take that nothing more comes: what is still held back is looked at as well as can be."""
        if self._failure is None:
            self._detector.finish(self._report)

    def result(self, *, exit_status: int | None = None) -> SanitizeResult:
        """Return what is known by now. Raises what went wrong while it was looked at."""
        if self._failure:
            raise self._failure
        notes = [_times(reason, count) for reason, count in self._notes.items()]
        return self._detector.result(
            self._report, exit_status=exit_status, stopped=self.stopped, notes=notes
        )

    def _feed(self, batch: Batch) -> None:
        found = self._detector.feed(batch, self._report)
        # It may be suppressed, which takes a Result to see.
        if found and self._stop_on_first and findings(self.result()) and not self.stopped:
            self.stopped = True
            self._warn("a race was found: the program is stopped")


def _times(reason: str, count: int) -> str:
    return f"{reason} ({count} processes)" if count > 1 else reason
