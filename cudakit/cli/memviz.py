"""``cudakit memviz``: where the memory went, from a snapshot file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.options import OutputOptions, output_options, percent
from cudakit.cli.output import Output, open_output
from cudakit.cli.progress import progress_line

if TYPE_CHECKING:
    from cudakit.core.memory.result import MemoryResult

_EXPORTS = {
    "html": "Write the report as one offline HTML page.",
    "csv": "Write every allocation as a row.",
    "perfetto": "Write curves and allocations as a trace for ui.perfetto.dev.",
    "collapsed": "Write held bytes as collapsed stacks, for flame graphs.",
    "speedscope": "Write held bytes by stack for speedscope.",
}


def _pool(text: str) -> tuple[int, int]:
    first, _, second = text.partition(",")
    if not (first.isdecimal() and second.isdecimal()):
        raise click.BadParameter(f"{text!r} is not a pool; write two numbers, for example 0,1")
    return int(first), int(second)


def _moment(text: str) -> str | int:
    if text in ("peak", "end", "oom"):
        return text
    if not text.isdecimal():
        raise click.BadParameter(f"{text!r} is not peak, end, oom or the index of an event")
    return int(text)


def _device(text: str) -> int:
    if text == "host":
        return -1
    number = text.removeprefix("cuda:")
    if not number.isdecimal():
        raise click.BadParameter(f"{text!r} is not a device; write 0, cuda:0 or host")
    return int(number)


def _export_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, line in reversed(_EXPORTS.items()):
        command = click.option(f"--{name}", metavar="FILE", help=line)(command)
    return command


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="SNAPSHOT...")
@click.option(
    "--at",
    type=_moment,
    default="peak",
    show_default=True,
    metavar="WHEN",
    help="The moment the tables speak of: peak, end, oom (the last one), or the index of an event.",
)
@click.option("--device", type=_device, metavar="N", help="One device only: 0, cuda:0 or host.")
@click.option("--stream", type=int, metavar="N", help="One stream only, by its number in the report.")
@click.option("--pool", type=_pool, metavar="A,B", help="One memory pool only, by its two numbers.")
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="Rows of each table; 0 shows all.",
)
@click.option("--diff", "before", metavar="SNAPSHOT", help="Compare with an earlier snapshot.")
@click.option(
    "--fail-on-growth",
    type=percent,
    metavar="RATIO",
    help="With --diff: exit with 1 if peak or end grew by more than this, for example 5%.",
)
@_export_options
@output_options
def memviz(
    *,
    files: tuple[str, ...],
    at: str | int,
    device: int | None,
    stream: int | None,
    pool: tuple[int, int] | None,
    top: int,
    before: str | None,
    fail_on_growth: float | None,
    output: OutputOptions,
    **exports: str | None,
) -> int:
    """Show who holds GPU memory, what fragments it, and why it ran out.

    SNAPSHOT is what torch.cuda.memory._dump_snapshot() wrote: pickle or JSON, plain, .gz or .zst; - reads
    standard input. Several files are compared. Nothing in a file is executed.

    \b
    cudakit memviz snapshot.pkl
    cudakit memviz snapshot.pkl --at oom --html report.html
    cudakit memviz after.pkl --diff before.pkl --fail-on-growth 5%
    """
    from cudakit.core.memory.analyze import MemorySpec

    spec = MemorySpec(at=at, device=device, stream=stream, pool=pool)
    if fail_on_growth is not None and before is None:
        raise click.UsageError("--fail-on-growth needs --diff")
    with ExitStack() as stack:
        # Before the long work: a file that cannot be written fails at once.
        main = stack.enter_context(open_output(output.path, force=output.force))
        opened = {
            name: stack.enter_context(open_output(path, force=output.force))
            for name, path in exports.items()
            if path is not None
        }
        result = _analyze(files, spec, quiet=output.quiet)
        _write(main, result, as_json=output.json, top=top)
        for name, target in opened.items():
            target.write(_export(name, result))
    return 0


def _analyze(files: tuple[str, ...], spec: Any, *, quiet: bool) -> MemoryResult:
    from cudakit.core.memory.analyze import analyze
    from cudakit.core.memory.load import load

    with progress_line(quiet=quiet) as progress:
        snapshots = []
        for number, file in enumerate(files):
            progress(f"reading {file}", number / len(files))
            snapshots.append(load(file))
        progress("analyzing", 1.0)
        return analyze(snapshots, spec)


def _write(target: Output, result: MemoryResult, *, as_json: bool, top: int) -> None:
    if as_json:
        from cudakit.render import json

        target.write(json.render(result))
    else:
        from cudakit.core.memory.present import report
        from cudakit.render import console

        document = report(result, top=top)
        target.write(console.render(document, width=target.width, color=target.color))


def _export(name: str, result: MemoryResult) -> str | Iterable[str]:
    from importlib import import_module

    from cudakit.core.memory.present import exports, report

    document = {
        "html": report,
        "csv": exports.allocations,
        "perfetto": exports.timeline,
        "collapsed": exports.flame,
        "speedscope": exports.flame,
    }[name](result)
    rendered: str | Iterable[str] = import_module(f"cudakit.render.{name}").render(document)
    return rendered
