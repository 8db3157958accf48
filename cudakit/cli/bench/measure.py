"""From a Spec to what is shown of it: what all benches have in common."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.options import Outputs, effort_options, outputs_options
from cudakit.cli.failure import ExitCode
from cudakit.cli.interrupts import held_interrupts
from cudakit.cli.options import gpu_option
from cudakit.cli.output import open_output
from cudakit.cli.progress import Progress, progress_line

if TYPE_CHECKING:
    from cudakit.core.bench.result import BenchResult
    from cudakit.core.bench.spec import Spec
    from cudakit.gpu.api import Gpu
    from cudakit.gpu.api.run_context import RunContext


def measuring(command: Callable[..., Spec]) -> Callable[..., Any]:
    """Make of a function that returns a Spec one that measures it, with the options for that."""

    @functools.wraps(command)
    def measured(*, gpu: str, outputs: Outputs, **options: Any) -> int:
        return measure(command(**options), gpu, outputs)

    return effort_options(gpu_option(outputs_options(measured)))


def measure(spec: Spec, gpu: str, outputs: Outputs) -> int:
    """Measure what a Spec asks for, write it into every file, and report."""
    from cudakit.cli.bench import files

    with open_output(None) as target:
        # Closed before the report: what was measured stays, whoever stops reading.
        with files.opened(outputs.paths, force=outputs.force) as opened:
            result = _run(spec, gpu, quiet=outputs.quiet)
            files.write(opened, result)
        from cudakit.core.bench.present import present

        target.answer(result, lambda: present(result), as_json=outputs.json)
    return exit_code(result)


def _run(spec: Spec, gpu: str, *, quiet: bool) -> BenchResult:
    from cudakit.core.bench.pipeline import run

    with opened_gpu(gpu, quiet=quiet) as (device, progress, run_context):
        return run(spec, device, progress, run_context=run_context)


@contextmanager
def opened_gpu(gpu: str, *, quiet: bool) -> Iterator[tuple[Gpu, Progress, RunContext]]:
    """Open a device to be measured, with its progress and run context; Ctrl-C interrupts between samples."""
    from cudakit.gpu.machine import open_machine
    from cudakit.gpu.open import open_gpu
    from cudakit.gpu.run_context import gather

    run_context = gather(open_machine(gpu), variables=dict(os.environ), command=_command())
    with (
        closing(open_gpu(gpu)) as device,
        progress_line(quiet=quiet) as show,
        held_interrupts() as deliver,
    ):

        def progress(stage: str, fraction: float) -> None:
            show(stage, fraction)
            deliver()

        yield device, progress, run_context


def _command() -> tuple[str, ...]:
    arguments = click.get_current_context().find_object(tuple)
    return ("cudakit", *(arguments or ()))


def exit_code(result: BenchResult) -> ExitCode:
    """Say first of all whether a value was wrong; a result that was broken off is there all the same."""
    from cudakit.core.bench.workload import Verification

    checks = [case.verification for case in result.results]
    if any(isinstance(check, Verification) and not check.passed for check in checks):
        return ExitCode.FINDINGS
    return ExitCode.OK if result.complete else ExitCode.INTERRUPTED
