"""``cudakit sanitize``: find the races in a log of ``cudakit run --sanitize --log FILE``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from cudakit.cli.options import FILE, Command, option_group, output_options, with_options
from cudakit.cli.output import OutputOptions, open_outputs, progress_line
from cudakit.cli.run import (
    BASELINE_OPTION,
    HOST_THREADS_OPTION,
    INTERNAL_OPTION,
    SHOW_OPTION,
    SUPPRESS_OPTION,
    WRITE_BASELINE_OPTION,
)
from cudakit.cli.run.race_report import (
    FORMATS,
    exit_code,
    match_baseline,
    open_baseline,
    race_report,
)


@click.command(cls=Command)
@lambda command: with_options(
    option_group(
        "Races",
        SHOW_OPTION,
        SUPPRESS_OPTION,
        BASELINE_OPTION,
        WRITE_BASELINE_OPTION,
        INTERNAL_OPTION,
        HOST_THREADS_OPTION,
    ),
    command,
)
@output_options(FORMATS)
@click.argument("file", metavar="FILE", type=FILE)
def sanitize(
    *,
    file: str,
    show: Literal["likely", "possible"],
    suppress: tuple[str, ...],
    baseline: str | None,
    write_baseline: str | None,
    counts_library_races: bool,
    host_threads: Literal["joined", "strict"],
    output: OutputOptions,
) -> int:
    """Find the races in the log of a run, without running the program again.

    FILE is a log that cudakit run --sanitize --log FILE wrote. The same options give
    the same report as the run. The exit code is 1 for races of the program, pairs of
    operations that could not be checked, collectives that ranks call differently, or
    an incomplete recording, such as a truncated log. A log that is truncated before
    its first CUDA calls cannot be analyzed: the exit code is 2.

    \b
    cudakit run --sanitize --log races.log train.py
    cudakit sanitize races.log --show possible
    cudakit sanitize races.log --suppress 'kernel:nccl*' -o races.html
    """
    from cudakit.gpu.compile import demangle
    from cudakit.sanitize.baseline import suppressions
    from cudakit.sanitize.detector import analyze_log
    from cudakit.sanitize.findings import RaceCollector
    from cudakit.sanitize.races import Confidence
    from cudakit.trace.run_log import LogReader

    with (
        open_outputs(output) as outputs,
        open_baseline(write_baseline, output) as new_baseline,
    ):
        collector = RaceCollector(
            min_confidence=Confidence(show),
            suppressions=suppressions(suppress),
            baseline=match_baseline(baseline),
            counts_library_races=counts_library_races,
            demangle=demangle,
        )
        with progress_line(quiet=output.quiet) as progress, LogReader(Path(file)) as log:
            result = analyze_log(
                log,
                collector,
                min_confidence=Confidence(show),
                strict_threads=host_threads == "strict",
                progress=progress,
            )
        outputs.write(race_report(result))
        new_baseline.write(result)
    return exit_code(result, races_are_accepted=write_baseline is not None)
