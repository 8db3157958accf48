"""One run: everything is checked, the program is started, and what was found is told."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from cudakit.cli.failure import ExitCode, report
from cudakit.cli.named_files import Files
from cudakit.cli.run import outputs, voice
from cudakit.cli.run.launcher import before_the_start
from cudakit.cli.run.watching import Watching
from cudakit.core.sanitize.races import Confidence
from cudakit.core.sanitize.report import findings
from cudakit.errors import EnvironmentUnusable, UsageError
from cudakit.gpu.capture.exact import with_accesses
from cudakit.gpu.capture.preflight import Ready, preflight
from cudakit.run.child import finish, shell_status
from cudakit.run.command import Command, resolve
from cudakit.run.environment import Settings
from cudakit.run.supervise import supervise


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What was asked."""

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
    watching: Watching
    files: Files


def run_program(spec: RunSpec) -> int:
    """Run the program; return its exit code, or 1 for races, or die of the signal that it died of."""
    status, code = 0, int(ExitCode.OK)
    try:
        with ExitStack() as stack:
            with before_the_start():
                prepared = _prepare(spec, stack)
            watching = prepared.watching
            status = supervise(
                prepared.command,
                settings=prepared.settings,
                consume=watching.consume,
                notify=watching.notify,
            )
            code = _tell(spec, prepared, shell_status(status))
    except Exception as error:
        if not status:
            raise
        # The program's status says more than that its report could not be written.
        code = report(error, as_json=False)
    return code if watching.stopped or not status else finish(status)


def _prepare(spec: RunSpec, stack: ExitStack) -> _Prepared:
    """Check all that can be checked, and open what is written later."""
    command = resolve(spec.words, python=spec.python)
    watching = Watching(
        show=Confidence(spec.show),
        suppress=spec.suppress,
        strict_threads=spec.host_threads == "strict",
        stop_on_first=spec.stop_on_first,
        warn=voice.warn,
    )
    files = stack.enter_context(outputs.opened(spec.outputs, force=spec.force))
    memory = outputs.snapshot_file(spec.snapshot, force=spec.force) if spec.memory else None
    if command.unwatched:
        watching.unwatched(command.unwatched)
    if spec.sanitize and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        watching.unwatched("CUDA_LAUNCH_BLOCKING is set, which hides races; they are told anyway")
    settings = Settings(sanitize=spec.sanitize, memory=memory, follow=not spec.no_follow)
    if spec.sanitize and (ready := _ready(spec, command, watching)):
        patches = Path(stack.enter_context(TemporaryDirectory(prefix="cudakit-")))
        ready, why_not = with_accesses(ready, spec.accesses, patches)
        if why_not:
            watching.unwatched(why_not)
        settings = replace(settings, **ready.settings())
    return _Prepared(command, settings, watching, files)


def _ready(spec: RunSpec, command: Command, watching: Watching) -> Ready | None:
    """Return what it takes to watch CUDA; None where it cannot be, and nothing is missed or that is said."""
    found = preflight(command.python)
    if isinstance(found, Ready):
        return found
    if _has_device():
        if spec.on_missing == "refuse":
            raise found.error()
        watching.unwatched(f"CUDA is not watched: {found.message}; {found.hint}")
    return None


def _has_device() -> bool:
    """Say whether anything is missed where CUDA cannot be watched: without a device nothing is."""
    from cudakit.gpu.cuda.current import device_count

    return device_count() > 0


def _tell(spec: RunSpec, prepared: _Prepared, exit_status: int) -> int:
    """Say and write what was found; return 1 for races."""
    watching = prepared.watching
    if spec.memory and not spec.quiet:
        voice.snapshots(watching.snapshots)
    if not spec.sanitize:
        return ExitCode.OK
    watching.finish()
    result = watching.result(exit_status=exit_status)
    voice.races(result, quiet=spec.quiet)
    try:
        outputs.write(prepared.files, result)
    except EnvironmentUnusable:
        if spec.quiet:
            voice.races(result, quiet=False)  # nowhere else is what was found
        raise
    return ExitCode.FINDINGS if findings(result) else ExitCode.OK
