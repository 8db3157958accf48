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
    open_outputs,
    progress_line,
)

if TYPE_CHECKING:
    from cudakit.bench.health import SuiteResult
    from cudakit.bench.result import BenchResult
    from cudakit.bench.spec import Spec
    from cudakit.gpu.api import Gpu
    from cudakit.gpu.api.facts import RunContext
    from cudakit.report.document import Document

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
    from cudakit.bench.health import SuiteResult, present_health
    from cudakit.bench.report import present
    from cudakit.bench.report.nvbench import nvbench
    from cudakit.bench.report.table import cases_table
    from cudakit.report import csv, html

    def document(*, detail: bool = False) -> Document:
        """Return the Document; ``detail`` adds drawings for an HTML page."""
        if isinstance(result, SuiteResult):
            return present_health(result, detail=detail)
        return present(result, detail=detail)

    # A table with all axes; None for the main table of the document.
    brief_table = None
    if not isinstance(result, SuiteResult) and result.results and not result.overlaps:
        brief_table = functools.partial(cases_table, result.results, with_common_axes=True)
    return Report(
        result=result,
        document=document,
        brief_table=brief_table,
        exports={
            "csv": lambda: csv.render(document()),
            "html": lambda: html.render(document(detail=True)),
            "nvbench.json": lambda: nvbench(document()),
        },
    )


@contextmanager
def opened_gpu(gpu: str, *, quiet: bool) -> Iterator[tuple[Gpu, Progress, RunContext]]:
    """Open a device, show a progress line, and gather the run context; signals interrupt between samples."""
    from cudakit.gpu.machine import open_machine
    from cudakit.gpu.open import open_gpu
    from cudakit.gpu.run_context import gather

    arguments = click.get_current_context().find_object(tuple)
    command = ("cudakit", *(arguments or ()))
    run_context = gather(open_machine(gpu), variables=dict(os.environ), command=command)
    with (
        closing(open_gpu(gpu)) as device,
        progress_line(quiet=quiet) as show_progress,
        held_interrupts() as deliver_interrupt,
    ):

        def progress(stage: str, fraction: float) -> None:
            show_progress(stage, fraction)
            deliver_interrupt()

        yield device, progress, run_context


def exit_code(result: BenchResult) -> ExitCode:
    """Return FINDINGS for wrong values, ENVIRONMENT for a failure, INTERRUPTED for an incomplete result."""
    from cudakit.bench.case import Verification

    verifications = (case.verification for case in result.results)
    if any(isinstance(it, Verification) and not it.passed for it in verifications):
        return ExitCode.FINDINGS
    if result.failure:
        return ExitCode.ENVIRONMENT
    return ExitCode.OK if result.complete else ExitCode.INTERRUPTED
