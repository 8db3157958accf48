"""Run a program: check options and environment, start it, report the findings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
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
from cudakit.cli.run.memory import MemoryMonitor, recorder_settings
from cudakit.cli.run.monitor import LogFile, Monitor, ProfileMonitor, why_cuda_is_unusable
from cudakit.cli.sanitize import (
    FORMATS,
    exit_code,
    match_baseline,
    open_baseline,
    race_report,
)
from cudakit.errors import EnvironmentUnusable, UsageError
from cudakit.record.command import Command, resolve
from cudakit.record.device_patch import add_device_patches
from cudakit.record.preflight import RecorderFiles, preflight
from cudakit.record.protocol import AgentMessage, AgentMessageKind, ProfileSettings, Settings
from cudakit.record.supervise import end_like_program, shell_status, supervise
from cudakit.sanitize.races import Confidence, SanitizeResult
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
        is_recorded = self.sanitize or self.profile
        _refuse_without("--profile", self.profile, self.time_options())
        if self.profile and self.sanitize:
            raise UsageError(
                "--profile and --sanitize exclude each other: --profile uses NVIDIA's CUPTI, --sanitize its"
                " Sanitizer API, and a process can use only one of them",
                hint="run the program twice: once with --sanitize, once with --profile",
            )
        if self.profile and self.memory and not self.no_driver:
            raise UsageError(
                "--profile with --memory needs --no-driver: --profile uses NVIDIA's CUPTI, --memory its"
                " Sanitizer API, and a process can use only one of them",
                hint="add --no-driver, which records memory by the hooks of libraries only",
            )
        recorders = "--sanitize or --profile"
        _refuse_without(recorders, is_recorded, {"--log": self.log is not None})
        _refuse_without(recorders, is_recorded, {"--require-gpu": self.require_gpu})
        if self.delay is not None and self.paused:
            raise UsageError(
                "--delay and --paused exclude each other: both choose when the profile begins",
                hint="remove --delay or --paused",
            )
        race_options = {
            "--show": self.show == "possible",
            "--suppress": self.suppress,
            "--baseline": self.baseline,
            "--write-baseline": self.write_baseline,
            "--internal": self.counts_library_races,
            "--accesses": self.accesses,
            "--host-threads": self.host_threads == "strict",
            "--stop-on-first": self.stop_on_first,
        }
        _refuse_without("--sanitize", self.sanitize, race_options)
        _refuse_without("--memory", self.memory, {"--snapshot": self.snapshot is not None})
        _refuse_without("--memory", self.memory, {"--limit": self.limit is not None})
        if self.no_driver and self.sanitize:
            raise UsageError(
                "--no-driver and --sanitize exclude each other",
                hint="remove --no-driver: --sanitize records calls of the driver",
            )
        _refuse_without("--memory", self.memory, {"--no-driver": self.no_driver})
        if self.fail_on and self.limit is None:
            raise UsageError("--fail-on limit needs --limit", hint="for example: --limit 20GiB")
        refuse_duplicates([*self.output.paths, *filter(None, [self.log, self.write_baseline])])

    def time_options(self) -> dict[str, bool]:
        """Return which of the options for times of a profile were passed."""
        return {
            "--delay": self.delay is not None,
            "--duration": self.duration is not None,
            "--range": self.range_name is not None,
            "--paused": self.paused,
        }


def _refuse_without(needed: str, is_needed_passed: bool, options: Mapping[str, object]) -> None:
    """Raise UsageError if options were passed that need another option."""
    passed = [name for name, value in options.items() if value]
    if passed and not is_needed_passed:
        verb, names = "needs" if len(passed) == 1 else "need", " and ".join(passed)
        raise UsageError(f"{names} {verb} {needed}", hint=f"add {needed}, or remove {names}")


@dataclass(frozen=True, slots=True)
class _PreparedRun:
    command: Command
    settings: Settings
    monitor: Monitor
    memory: MemoryMonitor | None
    profile: ProfileMonitor | None
    outputs: Outputs
    log: LogFile | None
    write_baseline: Callable[[SanitizeResult], None]

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
    formats = PROFILE_FORMATS if spec.profile else FORMATS
    outputs = stack.enter_context(open_outputs(spec.output, formats, open_terminal=standard_error))
    path = None
    if spec.memory:
        from cudakit.memory.torch_snapshot import extended_stem

        name = spec.snapshot or "cudakit-memory.pickle"
        path = Path(name)
        for file in (name, str(extended_stem(path, "-oom"))):
            refuse_unwritable(file, force=spec.output.force)
    write_baseline = stack.enter_context(open_baseline(spec.write_baseline, spec.output))
    log = LogFile(spec.log, stack, spec.output) if spec.log else None
    if command.not_instrumented:
        monitor.add_note(command.not_instrumented, unrecorded=True)
    if spec.sanitize and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        monitor.add_note("CUDA_LAUNCH_BLOCKING is set: it hides races, which are reported anyway")
    settings = Settings(sanitize=spec.sanitize, memory=path, follow=not spec.no_follow)
    usable = partial(
        usable_files,
        refuse=spec.on_missing == "refuse",
        add_note=partial(monitor.add_note, unrecorded=True),
    )
    if spec.profile:
        files = usable(preflight(command.python, profile=True), "the program was not profiled")
        times = ProfileSettings(
            delay=spec.delay or 0.0,
            duration=spec.duration or 0.0,
            range=spec.range_name or "",
            paused=spec.paused,
        )
        settings = replace(settings, profile=times, **(files.settings() if files else {}))
    if spec.sanitize and (
        ready_recorder := usable(preflight(command.python), "CUDA is not recorded")
    ):
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
        command, settings, monitor, memory_monitor, profile, outputs, log, write_baseline
    )


def _has_device() -> bool:
    from cudakit.gpu.cuda.current import device_count

    return device_count() > 0


def usable_files(
    files: RecorderFiles | EnvironmentUnusable,
    failure: str,
    *,
    refuse: bool,
    add_note: Callable[[str], None],
    has_device: Callable[[], bool] = _has_device,
) -> RecorderFiles | None:
    """Return the files of a recorder; None, with a note, if the program runs without it.

    A program without a CUDA device is not refused. Raises EnvironmentUnusable with ``refuse``.
    """
    if not isinstance(files, EnvironmentUnusable):
        return files
    if has_device():
        if refuse:
            raise files
        add_note(f"{failure}: {files.message}; {files.hint}")
    return None


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
            prepared_run.log.complete(result)
    prepared_run.write_baseline(result)
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
    has_work = any(process.has_work for process in activities)
    has_real_work = any(process.has_work for process in activities if not process.simulated)
    reason_without_work = ""
    if not has_work:
        has_cuda_calls = any(process.has_cuda_calls for process in activities)
        reason_without_work = monitor.why_no_profile(exit_status, has_cuda_calls=has_cuda_calls)
        monitor.add_note(reason_without_work)
    options = [name for name, is_passed in spec.time_options().items() if is_passed]
    if has_work and not has_real_work and options:
        verb = "has" if len(options) == 1 else "have"
        monitor.add_note(
            f"{' and '.join(options)} {verb} no effect on a simulated device, "
            "which is profiled from the first to the last operation"
        )
    incomplete = monitor.incomplete
    if spec.require_gpu and not has_real_work:
        incomplete.append(NO_REAL_GPU_WORK)
    outcome = Outcome(
        exit_status=exit_status, notes=tuple(monitor.notes), incomplete=tuple(incomplete)
    )
    try:
        profile_report = analyze_activities(activities, outcome).run_report(reason_without_work)
        prepared_run.outputs.write(profile_report)
    finally:
        if prepared_run.log:
            prepared_run.log.complete(outcome)
    return ExitCode.FINDINGS if outcome.incomplete else ExitCode.OK


def _report_memory(spec: RunSpec, prepared_run: _PreparedRun) -> bool:
    """Write the memory snapshots and print their paths; return whether a process passed the memory limit."""
    if prepared_run.memory is None:
        return False
    paths, limits_passed = prepared_run.memory.finish()
    for sentence in limits_passed:
        if spec.output.json:
            prepared_run.monitor.add_note(sentence)
        else:
            _warn(sentence)
    if not spec.output.json:
        for path in paths:
            _warn(f"memory snapshot written; analyze it with: cudakit memviz {path}")
        if not paths:
            reason = why_cuda_is_unusable() or "the program allocated no memory of a real GPU"
            _warn(f"no GPU memory was recorded, so no snapshot was written ({reason})")
    return bool(limits_passed)


def _warn(line: str) -> None:
    """Print one line on standard error at once, because the program may print too."""
    click.echo(f"cudakit: {printable(line)}", err=True)
