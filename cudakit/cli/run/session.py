"""One run: check everything, start the program, report the findings."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import click

from cudakit.cli.failure import ExitCode, before_the_start, report
from cudakit.cli.output import (
    Files,
    Output,
    open_by_name,
    printable,
    terminal_width,
    wants_color,
)
from cudakit.cli.run.monitor import Monitor
from cudakit.core.sanitize.races import Confidence
from cudakit.core.sanitize.report import findings
from cudakit.errors import EnvironmentUnusable, UsageError
from cudakit.gpu.capture.device_patch import add_device_patches
from cudakit.gpu.capture.preflight import Ready, preflight
from cudakit.run.child import finish, shell_status
from cudakit.run.command import Command, resolve
from cudakit.run.protocol import Settings
from cudakit.run.supervise import supervise

if TYPE_CHECKING:
    from cudakit.core.sanitize.result import SanitizeResult

# The files of -o, by their suffix.
_FORMATS = ("html", "json", "sarif")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The options of ``cudakit run``."""

    words: tuple[str, ...]
    sanitize: bool
    memory: bool
    outputs: tuple[str, ...]
    force: bool
    quiet: bool
    show: Literal["likely", "possible"]
    suppress: tuple[str, ...]
    accesses: Literal["exact", "arguments"] | None
    stop_on_first: bool
    host_threads: Literal["joined", "strict"]
    on_missing: Literal["refuse", "run"]
    snapshot: str
    python: str | None
    no_follow: bool

    def __post_init__(self) -> None:
        if not self.sanitize and not self.memory:
            raise UsageError(
                "nothing is to be watched",
                hint="--sanitize finds races, --memory records who holds torch's memory",
            )
        if self.outputs and not self.sanitize:
            raise UsageError(
                "-o writes the races that --sanitize finds",
                hint="add --sanitize; --snapshot FILE is where --memory writes",
            )


@dataclass(frozen=True, slots=True)
class _Prepared:
    command: Command
    settings: Settings
    monitor: Monitor
    files: Files


def run_program(spec: RunSpec) -> int:
    """Run the program; return its exit code, or 1 for races, or end by the signal that ended it."""
    status, code = 0, int(ExitCode.OK)
    try:
        with ExitStack() as stack:
            with before_the_start():
                prepared = _prepare(spec, stack)
            monitor = prepared.monitor
            status = supervise(
                prepared.command,
                settings=prepared.settings,
                consume=monitor.consume,
                notify=monitor.notify,
                stopping=monitor.stopping,
            )
            code = _report_findings(spec, prepared, shell_status(status))
    except Exception as error:
        if not status:
            raise
        # The program's status is more important than the failure to write the report.
        code = report(error, as_json=False)
    return code if monitor.stopped or not status else finish(status)


def _prepare(spec: RunSpec, stack: ExitStack) -> _Prepared:
    """Check the options and the environment, and open the output files."""
    command = resolve(spec.words, python=spec.python)
    monitor = Monitor(
        show=Confidence(spec.show),
        suppress=spec.suppress,
        strict_threads=spec.host_threads == "strict",
        stop_on_first=spec.stop_on_first,
        warn=_warn,
    )
    files = stack.enter_context(_open_outputs(spec.outputs, force=spec.force))
    memory = _snapshot_file(spec.snapshot, force=spec.force) if spec.memory else None
    if command.not_instrumented:
        monitor.add_note(command.not_instrumented)
    if spec.sanitize and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        monitor.add_note("CUDA_LAUNCH_BLOCKING is set, which hides races; they are told anyway")
    settings = Settings(sanitize=spec.sanitize, memory=memory, follow=not spec.no_follow)
    if spec.sanitize and (ready := _ready(spec, command, monitor)):
        patches = Path(stack.enter_context(TemporaryDirectory(prefix="cudakit-")))
        ready, why_not = add_device_patches(ready, spec.accesses, patches)
        if why_not:
            monitor.add_note(why_not)
        settings = replace(settings, **ready.settings())
    return _Prepared(command, settings, monitor, files)


def _ready(spec: RunSpec, command: Command, monitor: Monitor) -> Ready | None:
    """Return the recorder's settings; None without CUDA, or if --on-missing accepts that."""
    found = preflight(command.python)
    if isinstance(found, Ready):
        return found
    if _has_device():
        if spec.on_missing == "refuse":
            raise found.error()
        monitor.add_note(f"CUDA is not watched: {found.message}; {found.hint}")
    return None


def _has_device() -> bool:
    """Return whether the machine has a device: without one there is nothing to record."""
    from cudakit.gpu.cuda.current import device_count

    return device_count() > 0


def _report_findings(spec: RunSpec, prepared: _Prepared, exit_status: int) -> int:
    """Print and write the findings; return 1 for races."""
    monitor = prepared.monitor
    if spec.memory and not spec.quiet:
        _print_snapshots(monitor.snapshots)
    if not spec.sanitize:
        return ExitCode.OK
    monitor.finish()
    result = monitor.result(exit_status=exit_status)
    _print_races(result, quiet=spec.quiet)
    try:
        _write_outputs(prepared.files, result)
    except EnvironmentUnusable:
        if spec.quiet:
            _print_races(result, quiet=False)  # the only output of the findings
        raise
    return ExitCode.FINDINGS if findings(result) else ExitCode.OK


# --- messages, on standard error: standard output belongs to the program


def _warn(line: str) -> None:
    """Print one line at once."""
    click.echo(f"cudakit: {printable(line)}", err=True)


def _print_races(result: SanitizeResult, *, quiet: bool) -> None:
    """Write the report; with ``quiet`` one line if there are races."""
    from cudakit.core.sanitize.present import report, title
    from cudakit.core.sanitize.present.coverage import NOTHING_RECORDED, is_empty
    from cudakit.render import console

    if quiet:
        if result.races:
            _warn(title(result))
    elif is_empty(result) and not result.races:
        _warn(NOTHING_RECORDED)
    else:
        width, color = terminal_width(sys.stderr), wants_color(sys.stderr)
        text = console.render(report(result), width=width, color=color)
        Output(sys.stderr, "standard error", width, color).write(text)


def _print_snapshots(paths: Sequence[str]) -> None:
    """Print the paths of memory snapshots, and the command that reads them."""
    for path in paths:
        _warn(f"memory recorded; look at it with: cudakit memviz {path}")
    if not paths:
        _warn("no memory was recorded: torch did not use CUDA in this program")


# --- files


def _open_outputs(paths: Sequence[str], *, force: bool) -> AbstractContextManager[Files]:
    """Open every file of ``-o``. Raises UsageError for an unknown suffix."""
    if "-" in paths:
        raise UsageError(
            "standard output belongs to the program", hint="name a file, as in -o races.json"
        )
    return open_by_name(paths, _FORMATS, force=force)


def _write_outputs(files: Files, result: SanitizeResult) -> None:
    """Write the races into every file. Raises EnvironmentUnusable if a disk is full."""
    for form, file in files:
        file.write(_rendered(result, form))
        file.flush()


def _snapshot_file(path: str, *, force: bool) -> Path:
    """Return the path of the snapshot. Raises UsageError if it cannot be written."""
    target = Path(path)
    stem, suffix = os.path.splitext(path)
    if not target.parent.is_dir():
        raise UsageError(f"there is no directory {target.parent}", hint="make it, or name another")
    if target.is_dir():
        raise UsageError(f"{path} is a directory", hint="name a file in it: --snapshot FILE")
    for name in (path, f"{stem}-oom{suffix}"):
        if Path(name).exists() and not force:
            raise UsageError(
                f"{name} exists", hint="use --force to replace it, or --snapshot FILE for another"
            )
    return target


def _rendered(result: SanitizeResult, form: str) -> str:
    from cudakit.core.sanitize.present import report
    from cudakit.render import html, json, sarif

    if form == "json":
        return json.render(result)
    document = report(result, top=0)
    return html.render(document) if form == "html" else sarif.render(document, root=os.getcwd())
