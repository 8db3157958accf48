"""Measure a Spec and write its report, for all benches."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, TypeVar

import click

from cudakit.cli.failure import ExitCode, held_interrupts
from cudakit.cli.output import (
    COMMON_FORMATS,
    OutputOptions,
    Progress,
    Report,
    Text,
    open_outputs,
    progress_line,
)

if TYPE_CHECKING:
    from cudakit.bench.health import SuiteResult
    from cudakit.bench.result import BenchResult
    from cudakit.bench.spec import Spec
    from cudakit.gpu.api import Gpu
    from cudakit.gpu.api.facts import RunContext
    from cudakit.report.document import Document, Table

_Result = TypeVar("_Result", "BenchResult", "SuiteResult")

FORMATS = (*COMMON_FORMATS, "csv", "nvbench.json")


def measure_spec(spec: Spec, gpu: str, output: OutputOptions) -> ExitCode:
    """Open a device, measure a Spec, write the report, and return the exit code."""
    from cudakit.bench.pipeline import run

    return exit_code(measure(functools.partial(run, spec), gpu, output))


def measure(run_bench: Callable[..., _Result], gpu: str, output: OutputOptions) -> _Result:
    """Open a device, measure it with ``run_bench``, write the report, and return the result."""
    with open_outputs(output) as outputs:
        with opened_gpu(gpu, quiet=output.quiet) as (device, progress, run_context):
            result = run_bench(device, progress, run_context=run_context)
        outputs.write(report(result))
    return result


def report(result: BenchResult | SuiteResult) -> Report:
    """Return the report of a result, in all ``FORMATS``."""
    return Report(
        result=result,
        document=lambda: _document(result),
        brief_table=_brief_table(result),
        exports={
            "csv": lambda: _csv(result),
            "html": lambda: _page(result),
            "nvbench.json": lambda: _nvbench(result),
        },
    )


def _brief_table(result: BenchResult | SuiteResult) -> Callable[[], Table] | None:
    """Return a function that returns a table with all axes; None for the main table of the document."""
    from cudakit.bench.report.table import cases_table
    from cudakit.bench.result import BenchResult

    if not isinstance(result, BenchResult) or not result.results or result.overlaps:
        return None
    return lambda: cases_table(result.results, with_common_axes=True)


@contextmanager
def opened_gpu(gpu: str, *, quiet: bool) -> Iterator[tuple[Gpu, Progress, RunContext]]:
    """Open a device, show a progress line, and gather the run context; signals interrupt between samples."""
    from cudakit.gpu.machine import open_machine
    from cudakit.gpu.open import open_gpu
    from cudakit.gpu.run_context import gather

    run_context = gather(open_machine(gpu), variables=dict(os.environ), command=_command())
    with (
        closing(open_gpu(gpu)) as device,
        progress_line(quiet=quiet) as show_progress,
        held_interrupts() as deliver_interrupt,
    ):

        def progress(stage: str, fraction: float) -> None:
            show_progress(stage, fraction)
            deliver_interrupt()

        yield device, progress, run_context


def _command() -> tuple[str, ...]:
    arguments = click.get_current_context().find_object(tuple)
    return ("cudakit", *(arguments or ()))


def exit_code(result: BenchResult) -> ExitCode:
    """Return FINDINGS for wrong values, ENVIRONMENT for a failure, INTERRUPTED for an incomplete result."""
    from cudakit.bench.case import Verification

    verifications = [case.verification for case in result.results]
    if any(
        isinstance(verification, Verification) and not verification.passed
        for verification in verifications
    ):
        return ExitCode.FINDINGS
    if result.failure:
        return ExitCode.ENVIRONMENT
    return ExitCode.OK if result.complete else ExitCode.INTERRUPTED


def _csv(result: BenchResult | SuiteResult) -> Text:
    from cudakit.report import csv

    return csv.render(_document(result))


def _page(result: BenchResult | SuiteResult) -> Text:
    from cudakit.report import html

    return html.render(_document(result, detail=True))


def _nvbench(result: BenchResult | SuiteResult) -> Text:
    from cudakit.bench.report.nvbench import nvbench

    return nvbench(_document(result))


def _document(result: BenchResult | SuiteResult, *, detail: bool = False) -> Document:
    """Return a result as a Document; ``detail`` adds drawings for an HTML page."""
    from cudakit.bench.health import SuiteResult, present_health
    from cudakit.bench.report import present

    if isinstance(result, SuiteResult):
        return present_health(result, detail=detail)
    return present(result, detail=detail)
