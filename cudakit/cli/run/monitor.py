"""Monitor a running program: collect its races, and the reasons why parts of it are not recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING

import click

from cudakit.cli.output import OutputOptions, open_new_file, printable
from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.compile import demangle
from cudakit.profile.timeline import ActivityCollector
from cudakit.record.protocol import AgentMessage, AgentMessageKind
from cudakit.sanitize.baseline import suppressions
from cudakit.sanitize.detector import RaceDetector
from cudakit.sanitize.findings import RaceCollector, findings
from cudakit.sanitize.races import Confidence
from cudakit.trace.run_log import NO_REAL_GPU_WORK, LogWriter, Outcome

if TYPE_CHECKING:
    from cudakit.profile.timeline import Activities
    from cudakit.sanitize.baseline import BaselineMatcher
    from cudakit.sanitize.races import SanitizeResult
    from cudakit.trace.spool import Batch


class Monitor:
    """Consumes the records and the messages of a program's processes."""

    def __init__(
        self,
        *,
        min_confidence: Confidence,
        suppress: Sequence[str],
        baseline: BaselineMatcher | None = None,
        counts_library_races: bool = False,
        strict_threads: bool,
        stop_on_first: bool,
        accept_unrecorded: bool,
    ) -> None:
        self.is_stopped = False
        self._stop_requested = self._has_unrecorded_part = False
        self._failure: Exception | None = None
        self._notes: Counter[str] = Counter()
        self._incomplete_reasons: Counter[str] = Counter()
        self._stop_on_first = stop_on_first
        self._accept_unrecorded = accept_unrecorded
        self._report = RaceCollector(
            min_confidence=min_confidence,
            suppressions=suppressions(suppress),
            baseline=baseline,
            counts_library_races=counts_library_races,
            demangle=demangle,
        )
        shows_possible = min_confidence is Confidence.POSSIBLE
        self._detector = RaceDetector(strict_threads=strict_threads, report_possible=shows_possible)

    def on_batch(self, batch: Batch) -> bool:
        """Consume a batch of records; return True to stop the program."""
        if self._failure is None:
            try:
                new_races = self._detector.feed(batch, self._report)
                # The new race may be suppressed; only the result shows whether it is.
                if new_races and self._stop_on_first and not self._stop_requested:
                    self._stop_requested = bool(findings(self.result()))
            except Exception as failure:  # noqa: BLE001 must not disturb the program
                self._failure = failure
        return self._stop_requested

    def record_stop(self) -> None:
        """Record that the program was still running when it was stopped."""
        self.is_stopped = True

    def on_message(self, message: AgentMessage) -> None:
        """Consume a message of an agent."""
        is_failure = message.kind is AgentMessageKind.INCOMPLETE or (
            message.kind is AgentMessageKind.UNRECORDED and not self._accept_unrecorded
        )
        if is_failure:
            self._incomplete_reasons[message.text] += 1
        else:
            self.add_note(message.text)

    def add_note(self, reason: str, *, unrecorded: bool = False) -> None:
        """Add a reason why the program is not recorded, or is checked only in part or less exactly."""
        self._notes[reason] += 1
        self._has_unrecorded_part |= unrecorded

    @property
    def notes(self) -> list[str]:
        """The notes of ``add_note``."""
        return _with_counts(self._notes)

    @property
    def incomplete(self) -> list[str]:
        """The reasons why recorded events are missing."""
        return _with_counts(self._incomplete_reasons)

    @property
    def recorded_simulated_work_only(self) -> bool:
        """Whether work was recorded, and all of it on simulated devices."""
        return self._detector.has_recorded_work and not self._detector.has_recorded_gpu_work

    def finish(self) -> None:
        """Analyze the records that still wait for earlier ones: no more records will come."""
        if self._failure is None:
            self._detector.finish(self._report)

    def result(
        self, *, exit_status: int | None = None, require_gpu: bool = False
    ) -> SanitizeResult:
        """Return the result so far. Raises the first exception of ``on_batch``.

        With ``require_gpu``, a result without work of a real device is incomplete.
        """
        if self._failure:
            raise self._failure
        incomplete, no_gpu_work = self.incomplete, None
        if not self._detector.has_recorded_work:
            no_gpu_work = self._why_no_gpu_work(exit_status)
        if require_gpu and not self._detector.has_recorded_gpu_work:
            reason = "" if no_gpu_work else f": {self._why_no_gpu_work(exit_status)}"
            incomplete.append(f"{NO_REAL_GPU_WORK}{reason}")
        return self._detector.result(
            self._report,
            exit_status=exit_status,
            stopped=self.is_stopped,
            notes=self.notes,
            incomplete=incomplete,
            no_gpu_work=no_gpu_work,
        )

    def why_no_profile(self, exit_status: int | None, *, has_cuda_calls: bool) -> str:
        """Return the most likely reason why a profile has no GPU work."""
        if has_cuda_calls:
            return "the program called CUDA, but enqueued no work while it was profiled"
        return self._why_cuda_was_not_used(exit_status)

    def _why_no_gpu_work(self, exit_status: int | None) -> str:
        if self._detector.has_initialized_cuda:
            return "the program initialized CUDA, but enqueued no work"
        return self._why_cuda_was_not_used(exit_status)

    def _why_cuda_was_not_used(self, exit_status: int | None) -> str:
        if unusable_reason := why_cuda_is_unusable():
            return unusable_reason
        if self._has_unrecorded_part:
            return "the program was not recorded"
        if self._detector.has_recorded_work:
            return "the program used simulated devices only"
        if exit_status:
            return f"the program ended with status {exit_status} and had not initialized CUDA"
        return "the program did not initialize CUDA"


def _with_counts(reasons: Counter[str]) -> list[str]:
    """Return the reasons; a reason of several processes states their number."""
    return [
        f"{reason} ({process_count} processes)" if process_count > 1 else reason
        for reason, process_count in reasons.items()
    ]


def why_cuda_is_unusable() -> str:
    """Return why no program can use CUDA on this machine, or an empty text."""
    from cudakit.gpu.probe import start_probe
    from cudakit.units import Unavailable

    cuda_view = start_probe().answer()
    if isinstance(cuda_view, Unavailable):
        return cuda_view.reason
    if cuda_view.hidden and not cuda_view.devices:
        return f"CUDA_VISIBLE_DEVICES={cuda_view.visible_devices} hides all devices"
    if cuda_view.error:
        _, name, explanation = cuda_view.error
        return f"CUDA cannot be initialized: {name}, {explanation}"
    return "" if cuda_view.devices else "no CUDA device"


# --- The file of ``run --log`` ---------------------------------------------------------------------


class ProfileMonitor:
    """Collects the activities of all processes of a program."""

    def __init__(self) -> None:
        self._collector = ActivityCollector()
        self._failure: Exception | None = None

    def on_batch(self, batch: Batch) -> None:
        """Keep the records of a batch."""
        if self._failure is None:
            try:
                self._collector.add(batch)
            except Exception as failure:  # noqa: BLE001 must not disturb the program
                self._failure = failure

    def activities(self) -> list[Activities]:
        """Return the activities of each process. Raises the first exception of ``on_batch``."""
        if self._failure:
            raise self._failure
        return self._collector.activities()


class LogFile:
    """The file of ``--log``. If a write fails, the program continues, and ``complete`` raises the error."""

    def __init__(self, path: str, stack: ExitStack, options: OutputOptions) -> None:
        self._path = path
        self._is_quiet = options.quiet or options.json
        self._failure: OSError | None = None
        self._open_file = stack.enter_context(ExitStack())
        file = open_new_file(path, force=options.force)
        self._writer = LogWriter(self._open_file.enter_context(file))

    def add(self, batch: Batch) -> None:
        """Append a batch of records."""
        if not self._failure:
            try:
                self._writer.add(batch)
            except OSError as error:
                self._failure = error

    def complete(self, outcome: Outcome | SanitizeResult) -> None:
        """Write the outcome, which is a part of a result of a race check, close the file, and print its path.

        Raises EnvironmentUnusable if a write failed.
        """
        if self._failure:
            reason = f"cannot write {self._path}: {self._failure.strerror}"
            hint = "free space on the disk, or write to another directory"
            raise EnvironmentUnusable(reason, hint=hint) from self._failure
        values = {field.name: getattr(outcome, field.name) for field in fields(Outcome)}
        self._writer.finish(Outcome(**values))
        self._open_file.close()
        if not self._is_quiet:
            click.echo(f"Wrote {printable(self._path)}", err=True)
