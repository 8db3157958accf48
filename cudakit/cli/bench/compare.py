"""``cudakit bench compare``: compare two results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cudakit.cli.failure import ExitCode
from cudakit.cli.options import json_option
from cudakit.cli.output import Output, open_output

if TYPE_CHECKING:
    from cudakit.core.bench.compare import Comparison


@click.command(short_help="Say what became faster or slower between two runs.")
@click.argument("before", metavar="A", type=click.Path(path_type=Path))
@click.argument("after", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--fail-on",
    "fail_on",
    multiple=True,
    metavar="VERDICT[:CHANGE]",
    help="Exit with 1 where a case is slower, faster or ambiguous, by more than CHANGE: slower:5%. "
    "Repeatable. Then a case of B without figures fails too.",
)
@click.option("--force", is_flag=True, help="Compare also where machine or method differ.")
@click.option("--markdown", is_flag=True, help="Print it as Markdown, for a pull request.")
@json_option
def compare(
    *,
    before: Path,
    after: Path,
    fail_on: tuple[str, ...],
    force: bool,
    markdown: bool,
    json: bool,
) -> int:
    """Say of each case whether B is faster or slower than A, the same, or ambiguous.

    A and B are files that cudakit bench wrote with -o FILE.json or --json. A case is slower where the
    confidence intervals of the two medians lie apart, in time and in cycles: a clock that was merely
    lower makes it ambiguous. Runs of different machines or methods are refused.

    \b
    cudakit bench compare before.json after.json
    cudakit bench compare before.json after.json --fail-on slower:5%
    cudakit bench compare before.json after.json --markdown > comment.md
    """
    if json and markdown:
        raise click.UsageError("--json and --markdown are two forms")
    from cudakit.core.bench.compare import compare as compare_results
    from cudakit.core.bench.compare import parse_fail_on
    from cudakit.core.bench.load import load_result

    limits = [parse_fail_on(text) for text in fail_on]
    comparison = compare_results(load_result(before), load_result(after), force=force)
    with open_output(None) as target:
        _write(comparison, target, as_json=json, as_markdown=markdown)
    fails = limits and (_lacks_figures(comparison) or any(x.found(comparison) for x in limits))
    return ExitCode.FINDINGS if fails else ExitCode.OK


def _write(comparison: Comparison, target: Output, *, as_json: bool, as_markdown: bool) -> None:
    from cudakit.core.bench.present.comparison import present_comparison

    if as_markdown:
        from cudakit.render import markdown

        target.write(markdown.render(present_comparison(comparison)))
    else:
        target.answer(comparison, lambda: present_comparison(comparison), as_json=as_json)


def _lacks_figures(comparison: Comparison) -> bool:
    """Return whether the later run lacks a figure, so that it may be slower.

    A figure that both runs lack for the same reason is not offered here.
    """
    from cudakit.units import Unavailable

    return any(
        isinstance(case.after_s, Unavailable) and case.after_s != case.before_s
        for case in comparison.cases
    )
