"""Measure a Spec, write its files and print its report: what all benches have in common."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cudakit.cli.bench.options import Outputs, effort_options, outputs_options
from cudakit.cli.failure import ExitCode
from cudakit.cli.interrupts import held_interrupts
from cudakit.cli.options import gpu_option
from cudakit.cli.output import open_by_name, open_output
from cudakit.cli.progress import Progress, progress_line

if TYPE_CHECKING:
    from cudakit.core.bench.health import SuiteResult
    from cudakit.core.bench.result import BenchResult
    from cudakit.core.bench.spec import Spec
    from cudakit.core.bench.tuning.tuned import Tuned
    from cudakit.document import Document
    from cudakit.gpu.api import Gpu
    from cudakit.gpu.api.run_context import RunContext

_Result = TypeVar("_Result", "BenchResult", "SuiteResult")

# Suffixes; the first that matches is the format of a file.
FORMATS = ("nvbench.json", "json", "csv", "md", "html")


def measuring(command: Callable[..., Spec]) -> Callable[..., Any]:
    """Turn a function that returns a Spec into a command that measures it, with the common options."""

    @functools.wraps(command)
    def measured(*, gpu: str, outputs: Outputs, **options: Any) -> int:
        return measure(command(**options), gpu, outputs)

    return effort_options(gpu_option(outputs_options(measured)))


def measure(spec: Spec, gpu: str, outputs: Outputs) -> int:
    """Measure what a Spec asks for, write the files, and print the report."""
    from cudakit.core.bench.pipeline import run

    return exit_code(report(functools.partial(run, spec), gpu, outputs))


def report(work: Callable[..., _Result], gpu: str, outputs: Outputs) -> _Result:
    """Let ``work`` measure a device, write the files, print the report, and return the result."""
    with open_output(None) as target:
        # Files are closed before the report: they are complete even if the reader of the report stops.
        with open_by_name(outputs.paths, FORMATS, force=outputs.force) as files:
            with opened_gpu(gpu, quiet=outputs.quiet) as (device, progress, run_context):
                result = work(device, progress, run_context=run_context)
            for form, file in files:
                file.write(rendered(result, form))
        target.answer(result, lambda: _document(result), as_json=outputs.json)
    return result


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
    """Return FINDINGS for wrong values, else INTERRUPTED for an incomplete result."""
    from cudakit.core.bench.workload import Verification

    checks = [case.verification for case in result.results]
    if any(isinstance(check, Verification) and not check.passed for check in checks):
        return ExitCode.FINDINGS
    return ExitCode.OK if result.complete else ExitCode.INTERRUPTED


def rendered(result: BenchResult | SuiteResult | Tuned, form: str) -> str | Iterable[str]:
    """Return the content of a file with a result, in one of ``FORMATS``."""
    from cudakit.core.bench.present.nvbench import nvbench
    from cudakit.render import csv, html, json, markdown

    match form:
        case "json":
            return json.render(result)
        case "html":
            return html.render(_document(result, detail=True))
        case "md":
            return markdown.render(_document(result))
        case "csv":
            return csv.render(_document(result))
    return nvbench(_document(result))


def _document(result: BenchResult | SuiteResult | Tuned, *, detail: bool = False) -> Document:
    """Present a result; ``detail`` adds pictures for a page."""
    from cudakit.core.bench.health import SuiteResult
    from cudakit.core.bench.present import present
    from cudakit.core.bench.present.health import present_health
    from cudakit.core.bench.tuning.present import present_tuned
    from cudakit.core.bench.tuning.tuned import Tuned

    if isinstance(result, Tuned):
        return present_tuned(result)
    if isinstance(result, SuiteResult):
        return present_health(result, detail=detail)
    return present(result, detail=detail)
