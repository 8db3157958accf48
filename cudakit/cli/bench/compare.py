"""``cudakit bench compare``: compare two results."""

from __future__ import annotations

from pathlib import Path

import click

from cudakit.cli.failure import ExitCode
from cudakit.cli.options import FILE, Command, Value, option, output_options
from cudakit.cli.output import COMMON_FORMATS, OutputOptions, Report, open_outputs


@click.command(cls=Command, short_help="Compare two results: faster, slower or the same?")
@click.argument("before", metavar="BEFORE.json", type=FILE)
@click.argument("after", metavar="AFTER.json", type=FILE)
@option(
    "--fail-on",
    "fail_on",
    type=Value(("slower:5%", "slower", "ambiguous", "faster")),
    multiple=True,
    metavar="KIND[:PERCENT]",
    help="Exit with 1 if a case is slower, faster or ambiguous, by more than PERCENT if given: slower:5%. "
    "A case with a time in BEFORE also fails if AFTER contains the case without a time. Repeatable.",
)
@option(
    "--ignore-mismatch",
    is_flag=True,
    help="Compare even if the machine or the method of the two runs differs.",
)
@output_options(COMMON_FORMATS)
def compare(
    *,
    before: str,
    after: str,
    fail_on: tuple[str, ...],
    ignore_mismatch: bool,
    output: OutputOptions,
) -> int:
    """Report for each case whether AFTER is faster, slower, the same or ambiguous.

    BEFORE and AFTER are results of cudakit bench, written with -o FILE.json or --json. A case is slower or
    faster if the 95% confidence intervals of the two medians do not overlap, both in time and in clock
    cycles. The case is ambiguous if the times differ only because the SM clock did, if a time is missing, or
    if a sample of gds or of copy --overlap has different numbers of transfers or copies in the two runs.
    Runs on different GPU models or drivers, or with different methods, are an error.

    \b
    cudakit bench compare before.json after.json
    cudakit bench compare before.json after.json --fail-on slower:5%
    cudakit bench compare before.json after.json -o comment.md
    """
    from cudakit.bench.compare import compare as compare_results
    from cudakit.bench.compare import failing_cases, parse_fail_on, present_comparison
    from cudakit.bench.load import load_result

    fail_conditions = [parse_fail_on(text) for text in fail_on]
    with open_outputs(output) as outputs:
        comparison = compare_results(
            load_result(Path(before)), load_result(Path(after)), force=ignore_mismatch
        )
        failed = failing_cases(comparison, fail_conditions) if fail_conditions else None
        outputs.write(
            Report(result=comparison, document=lambda: present_comparison(comparison, failed))
        )
    return ExitCode.FINDINGS if failed else ExitCode.OK
