"""Run a program: check options and environment, start it, report the findings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import click

from cudakit.cli.failure import ExitCode, errors_before_start, report_error
from cudakit.cli.output import (
    OutputOptions,
    Outputs,
    open_outputs,
    printable,
    refuse_duplicates,
    refuse_unwritable,
    standard_error,
)
from cudakit.cli.profile import FORMATS as PROFILE_FORMATS
from cudakit.cli.profile import analyze_activities
from cudakit.cli.run.log_file import LogFile
from cudakit.cli.run.memory import MemoryMonitor, recorder_settings
from cudakit.cli.run.monitor import Monitor, why_cuda_is_unusable
from cudakit.cli.run.profile import (
    ProfileMonitor,
    check_profile,
    check_profile_options,
    profile_settings,
)
from cudakit.cli.run.race_report import (
    FORMATS,
    BaselineFile,
    exit_code,
    match_baseline,
    open_baseline,
    race_report,
)
from cudakit.errors import EnvironmentUnusable, UsageError
from cudakit.profile.activities import Activities
from cudakit.record.child import end_like_program, shell_status
from cudakit.record.command import Command, resolve
from cudakit.record.device_patch import add_device_patches
from cudakit.record.preflight import RecorderFiles, preflight
from cudakit.record.protocol import AgentMessage, AgentMessageKind, Settings
from cudakit.record.supervise import supervise
from cudakit.sanitize.races import Confidence
from cudakit.trace.run_log import NO_REAL_GPU_WORK, Outcome
from cudakit.trace.spool import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The options of ``cudakit run``."""

    command_words: tuple[str, ...]  # script, module, code or program, and its arguments
    sanitize: bool
    profile: bool
    memory: bool
    output: OutputOptions
    show: Literal["likely", "possible"]
    suppress: tuple[str, ...]
    baseline: str | None
    write_baseline: str | None
    counts_library_races: bool
    accesses: Literal["auto", "exact", "arguments"] | None
    stop_on_first: bool
    host_threads: Literal["joined", "strict"]
    on_missing: Literal["refuse", "run"]
    require_gpu: bool
    snapshot: str | None
    log: str | None
    no_driver: bool
    limit: int | None
    fail_on: Literal["limit"] | None
    python: str | None
    no_follow: bool
    delay: float | None
    duration: float | None
    range_name: str | None
    paused: bool

    def __post_init__(self) -> None:
        if not self.sanitize and not self.memory and not self.profile:
            raise UsageError(
                "nothing to record",
                hint="--profile finds where GPU time goes, --sanitize finds races,"
                " --memory records GPU memory",
            )
        if (self.output.targets or self.output.json) and not (self.sanitize or self.profile):
            raise UsageError(
                "-o and --json write the races that --sanitize finds, or the profile of --profile",
                hint="add --sanitize or --profile; --memory writes its result with --snapshot FILE",
            )
        check_profile_options(
            self.time_options(),
            has_profile=self.profile,
            has_sanitize=self.sanitize,
            has_driver_memory=self.memory and not self.no_driver,
        )
        self._check_recording_options()
        if not self.sanitize and (options := self._race_options()):
            verb = "needs" if len(options) == 1 else "need"
            raise UsageError(
                f"{' and '.join(options)} {verb} --sanitize",
                hint=f"add --sanitize, or remove {' and '.join(options)}",
            )
        if self.snapshot is not None and not self.memory:
            raise UsageError("--snapshot needs --memory", hint="add --memory, or remove --snapshot")
        if self.limit is not None and not self.memory:
            raise UsageError("--limit needs --memory", hint="add --memory, or remove --limit")
        if self.no_driver and (self.sanitize or not self.memory):
            if self.sanitize:
                raise UsageError(
                    "--no-driver and --sanitize exclude each other",
                    hint="remove --no-driver: --sanitize records calls of the driver",
                )
            raise UsageError(
                "--no-driver needs --memory", hint="add --memory, or remove --no-driver"
            )
        if self.fail_on and self.limit is None:
            raise UsageError("--fail-on limit needs --limit", hint="for example: --limit 20GiB")
        refuse_duplicates([*self.output.paths, *filter(None, [self.log, self.write_baseline])])

    def _check_recording_options(self) -> None:
        """Raise UsageError for options that need --sanitize or --profile, or exclude each other."""
        for option, is_passed in (
            ("--log", self.log is not None),
            ("--require-gpu", self.require_gpu),
        ):
            if is_passed and not (self.sanitize or self.profile):
                raise UsageError(
                    f"{option} needs --sanitize or --profile",
                    hint=f"add --sanitize or --profile, or remove {option}",
                )
        if self.delay is not None and self.paused:
            raise UsageError(
                "--delay and --paused exclude each other: both choose when the profile begins",
                hint="remove --delay or --paused",
            )

    def time_options(self) -> dict[str, bool]:
        """Return whether the user passed each of the options for times of a profile."""
        return {
            "--delay": self.delay is not None,
            "--duration": self.duration is not None,
            "--range": self.range_name is not None,
            "--paused": self.paused,
        }

    def _race_options(self) -> list[str]:
        """List the options on races that were passed."""
        is_passed_by_option = {
            "--show": self.show == "possible",
            "--suppress": self.suppress,
            "--baseline": self.baseline,
            "--write-baseline": self.write_baseline,
            "--internal": self.counts_library_races,
            "--accesses": self.accesses,
            "--host-threads": self.host_threads == "strict",
            "--stop-on-first": self.stop_on_first,
        }
        return [option for option, is_passed in is_passed_by_option.items() if is_passed]


@dataclass(frozen=True, slots=True)
class _PreparedRun:
    command: Command
    settings: Settings
    monitor: Monitor
    memory: MemoryMonitor | None
    profile: ProfileMonitor | None
    outputs: Outputs
    log: LogFile | None
    new_baseline: BaselineFile

    def on_batch(self, batch: Batch) -> bool:
        """Write a batch of records to the log, and analyze it; return True to stop the program."""
        if self.log:
            self.log.add(batch)
        if self.memory:
            self.memory.on_batch(batch)
        if self.profile:
            self.profile.on_batch(batch)
        return self.settings.sanitize and self.monitor.on_batch(batch)

    def on_message(self, message: AgentMessage) -> None:
        """Handle a message of an agent."""
        if self.memory and self.memory.on_message(message):
            return
        is_recorded = self.settings.sanitize or self.settings.profile
        if message.kind is AgentMessageKind.INCOMPLETE and not is_recorded:
            self.monitor.add_note(message.text)
        else:
            self.monitor.on_message(message)


def run_program(spec: RunSpec) -> int:
    """Run the program; return its exit code or 1 for races, or end by the signal that ended the program."""
    status, exit_code = 0, int(ExitCode.OK)
    try:
        with ExitStack() as stack:
            with errors_before_start(as_json=spec.output.json):
                prepared_run = _prepare(spec, stack)
            monitor = prepared_run.monitor
            status = supervise(
                prepared_run.command,
                settings=prepared_run.settings,
                on_batch=prepared_run.on_batch,
                on_message=prepared_run.on_message,
                on_stop=monitor.record_stop,
            )
            exit_code = _report_findings(spec, prepared_run, shell_status(status))
    except Exception as error:
        if not status:
            raise
        # The program's status is more important than the failure to write the report.
        exit_code = report_error(
            error, open_json_output=standard_error if spec.output.json else None
        )
    return exit_code if monitor.is_stopped or not status else end_like_program(status)


def _prepare(spec: RunSpec, stack: ExitStack) -> _PreparedRun:
    """Check the options and the environment, and open the output files."""
    command = resolve(spec.command_words, python=spec.python)
    monitor = Monitor(
        min_confidence=Confidence(spec.show),
        suppress=spec.suppress,
        baseline=match_baseline(spec.baseline),
        counts_library_races=spec.counts_library_races,
        strict_threads=spec.host_threads == "strict",
        stop_on_first=spec.stop_on_first,
        accept_unrecorded=spec.on_missing == "run",
    )
    outputs = stack.enter_context(
        open_outputs(spec.output, _formats(spec), open_terminal=standard_error)
    )
    path = _snapshot_file(spec) if spec.memory else None
    new_baseline = stack.enter_context(open_baseline(spec.write_baseline, spec.output))
    log = LogFile(spec.log, stack, force=spec.output.force) if spec.log else None
    if command.not_instrumented:
        monitor.add_note(command.not_instrumented, unrecorded=True)
    if spec.sanitize and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        monitor.add_note("CUDA_LAUNCH_BLOCKING is set: it hides races, which are reported anyway")
    settings = Settings(sanitize=spec.sanitize, memory=path, follow=not spec.no_follow)
    if spec.profile:
        settings = _add_profile(settings, spec, command, monitor)
    if spec.sanitize and (ready_recorder := _prepare_recorder(spec, command, monitor)):
        patches = Path(stack.enter_context(TemporaryDirectory(prefix="cudakit-")))
        ready_recorder, reason = add_device_patches(ready_recorder, spec.accesses, patches)
        if reason:
            monitor.add_note(reason)
        if ready_recorder.templates and spec.host_threads == "strict":
            ready_recorder = replace(ready_recorder, templates=False)
            if spec.accesses == "auto":
                monitor.add_note(
                    "all launches are recorded: --host-threads strict excludes --accesses auto"
                )
        settings = replace(settings, **ready_recorder.settings())
    memory_monitor = None
    if path:
        memory_monitor = MemoryMonitor(path, limit_bytes=spec.limit, add_note=monitor.add_note)
        if not spec.sanitize:
            memory_settings = recorder_settings(
                command.python, monitor.add_note, use_driver=not spec.no_driver
            )
            settings = replace(settings, **memory_settings)
    profile = ProfileMonitor() if spec.profile else None
    return _PreparedRun(
        command, settings, monitor, memory_monitor, profile, outputs, log, new_baseline
    )


def _formats(spec: RunSpec) -> Sequence[str]:
    """Return the formats of the report on races, or on the profile."""
    return PROFILE_FORMATS if spec.profile else FORMATS


def _add_profile(settings: Settings, spec: RunSpec, command: Command, monitor: Monitor) -> Settings:
    """Add the settings of a profile to the recorder settings, if the program can be profiled."""
    profile_ready = check_profile(
        command.python,
        has_device=_has_device,
        refuse=spec.on_missing == "refuse",
        add_note=lambda note: monitor.add_note(note, unrecorded=True),
    )
    time_settings = profile_settings(
        delay=spec.delay,
        duration=spec.duration,
        range_name=spec.range_name,
        is_paused=spec.paused,
    )
    return replace(
        settings, profile=time_settings, **(profile_ready.settings() if profile_ready else {})
    )


def _prepare_recorder(spec: RunSpec, command: Command, monitor: Monitor) -> RecorderFiles | None:
    """Return the recorder's settings, or None if the program runs without a recorder."""
    files_or_refusal = preflight(command.python)
    if isinstance(files_or_refusal, RecorderFiles):
        return files_or_refusal
    if _has_device():
        if spec.on_missing == "refuse":
            raise files_or_refusal.error()
        reason = f"CUDA is not recorded: {files_or_refusal.message}; {files_or_refusal.hint}"
        monitor.add_note(reason, unrecorded=True)
    return None


def _has_device() -> bool:
    """Return whether the machine has a CUDA device."""
    from cudakit.gpu.cuda.current import device_count

    return device_count() > 0


def _report_findings(spec: RunSpec, prepared_run: _PreparedRun, exit_status: int) -> int:
    """Print and write the findings; return 1 for races or an incomplete result."""
    monitor = prepared_run.monitor
    fails_for_limit = _report_memory(spec, prepared_run) and spec.fail_on == "limit"
    if prepared_run.profile:
        code = _report_profile(spec, prepared_run, prepared_run.profile, exit_status)
        return ExitCode.FINDINGS if fails_for_limit else code
    if not spec.sanitize:
        for note in monitor.notes:
            _warn(note)
        return ExitCode.FINDINGS if fails_for_limit else ExitCode.OK
    monitor.finish()
    if spec.accesses and monitor.recorded_simulated_work_only:
        monitor.add_note("--accesses has no effect on a simulated device, whose accesses are known")
    result = monitor.result(exit_status=exit_status, require_gpu=spec.require_gpu)
    races, stderr = race_report(result), standard_error()
    try:
        prepared_run.outputs.write(races)
    except EnvironmentUnusable:
        # All findings are printed, because no file contains them.
        stderr.write(races.text("txt", stderr))
        raise
    finally:
        if prepared_run.log:
            prepared_run.log.complete_with_result(
                result, quiet=spec.output.quiet or spec.output.json
            )
    prepared_run.new_baseline.write(result)
    if fails_for_limit:
        return ExitCode.FINDINGS
    return exit_code(result, races_are_accepted=spec.write_baseline is not None)


def _report_profile(
    spec: RunSpec, prepared_run: _PreparedRun, profile: ProfileMonitor, exit_status: int
) -> int:
    """Print and write where the GPU time went.

    Returns 1 if the recording is incomplete, and if no work of a GPU was recorded but is required.
    """
    monitor = prepared_run.monitor
    activities = profile.activities()
    reason_without_work = ""
    if not any(process.has_work for process in activities):
        has_cuda_calls = any(process.has_cuda_calls for process in activities)
        reason_without_work = monitor.why_no_profile(exit_status, has_cuda_calls=has_cuda_calls)
        monitor.add_note(reason_without_work)
    if ignored_options := _options_without_effect(spec, activities):
        verb = "has" if len(ignored_options) == 1 else "have"
        monitor.add_note(
            f"{' and '.join(ignored_options)} {verb} no effect on a simulated device, "
            "which is profiled from the first to the last operation"
        )
    incomplete = monitor.incomplete
    if spec.require_gpu and not any(
        process.has_work for process in activities if not process.simulated
    ):
        incomplete.append(NO_REAL_GPU_WORK)
    outcome = Outcome(
        exit_status=exit_status, notes=tuple(monitor.notes), incomplete=tuple(incomplete)
    )
    try:
        profile_report = analyze_activities(activities, outcome).run_report(reason_without_work)
        prepared_run.outputs.write(profile_report)
    finally:
        if prepared_run.log:
            is_quiet = spec.output.quiet or spec.output.json
            prepared_run.log.complete(outcome, quiet=is_quiet)
    return ExitCode.FINDINGS if outcome.incomplete else ExitCode.OK


def _options_without_effect(spec: RunSpec, activities: Sequence[Activities]) -> list[str]:
    """Return the passed options for times of a profile if all work ran on simulated devices."""
    working_processes = [process for process in activities if process.has_work]
    if not working_processes or not all(process.simulated for process in working_processes):
        return []
    return [option for option, is_passed in spec.time_options().items() if is_passed]


def _report_memory(spec: RunSpec, prepared_run: _PreparedRun) -> bool:
    """Write the memory snapshots, and return whether a process passed the memory limit."""
    if prepared_run.memory is None:
        return False
    files = prepared_run.memory.finish()
    if spec.output.json:
        for sentence in files.limits_passed:
            prepared_run.monitor.add_note(sentence)
    else:
        for sentence in files.limits_passed:
            _warn(sentence)
        _print_snapshots(files.paths)
    return bool(files.limits_passed)


# --- messages, on standard error: standard output belongs to the program


def _warn(line: str) -> None:
    """Print one line on standard error at once, because the program may print too."""
    click.echo(f"cudakit: {printable(line)}", err=True)


def _print_snapshots(paths: Sequence[str]) -> None:
    """Print the paths of memory snapshots, and the command that reads them; or why there is no snapshot."""
    for path in paths:
        _warn(f"memory snapshot written; analyze it with: cudakit memviz {path}")
    if not paths:
        reason = why_cuda_is_unusable() or "the program allocated no memory of a real GPU"
        _warn(f"no GPU memory was recorded, so no snapshot was written ({reason})")


# --- files


def _snapshot_file(spec: RunSpec) -> Path:
    """Return the path of the snapshot. Raises UsageError if it cannot be written."""
    from cudakit.memory.torch_snapshot import extended_stem

    path = spec.snapshot or "cudakit-memory.pickle"
    for name in (path, extended_stem(Path(path), "-oom")):
        refuse_unwritable(str(name), force=spec.output.force)
    return Path(path)
