"""``cudakit memviz``: where the memory went, from a snapshot file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cudakit.cli.failure import ExitCode
from cudakit.cli.options import OutputOptions, byte_size, output_options, percent
from cudakit.cli.output import open_output
from cudakit.cli.progress import progress_line

if TYPE_CHECKING:
    from cudakit.core.memory.analyze import MemorySpec
    from cudakit.core.memory.result import DiffResult, MemoryResult
    from cudakit.core.memory.snapshot import Snapshot
    from cudakit.core.memory.whatif.result import WhatIfResult
    from cudakit.document import Document

_Result = TypeVar("_Result")

_EXPORTS = {
    "html": "Write the report as one offline HTML page.",
    "csv": "Write every allocation as a row.",
    "perfetto": "Write curves and allocations as a trace for ui.perfetto.dev.",
    "collapsed": "Write held bytes as collapsed stacks, for flame graphs.",
    "speedscope": "Write held bytes by stack for speedscope.",
}


def _moment(text: str) -> str | int:
    if text in ("peak", "end", "oom"):
        return text
    if not text.isdecimal():
        raise click.BadParameter(f"{text!r} is not peak, end, oom or the index of an event")
    return int(text)


def _device(text: str) -> int:
    from cudakit.core.memory.snapshot import HOST

    if text == "host":
        return HOST
    number = text.removeprefix("cuda:")
    if not number.isdecimal():
        raise click.BadParameter(f"{text!r} is not a device; write 0, cuda:0 or host")
    return int(number)


def _pool(text: str) -> tuple[int, int]:
    first, _, second = text.partition(",")
    if not (first.isdecimal() and second.isdecimal()):
        raise click.BadParameter(f"{text!r} is not a pool; write two numbers, for example 0,1")
    return int(first), int(second)


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
    help="The moment the tables speak of: peak, end, oom (the last) or the index of an event.",
)
@click.option("--device", type=_device, metavar="N", help="One device only: 0, cuda:0 or host.")
@click.option("--stream", type=int, metavar="N", help="One stream only, as the report numbers it.")
@click.option("--pool", type=_pool, metavar="A,B", help="One pool only, by its two numbers.")
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="Rows of each table; 0 shows all.",
)
@click.option(
    "--diff", "before", metavar="SNAPSHOT", help="Show what changed since an earlier one."
)
@click.option(
    "--fail-on-growth",
    "limit",
    type=percent,
    metavar="RATIO",
    help="With --diff: exit with 1 if more than this was added at peak or end, for example 5%.",
)
@click.option(
    "--what-if",
    "settings",
    multiple=True,
    metavar="SETTINGS",
    help="Replay the trace under other settings, as of PYTORCH_CUDA_ALLOC_CONF; '' are the defaults."
    " Repeatable.",
)
@click.option(
    "--what-if-limit",
    "memory",
    type=byte_size,
    metavar="SIZE",
    help="With --what-if: the memory that the device has, for example 80GiB.",
)
@_export_options
@output_options
def memviz(
    *,
    files: tuple[str, ...],
    top: int,
    before: str | None,
    limit: float | None,
    settings: tuple[str, ...],
    memory: int | None,
    output: OutputOptions,
    at: str | int,
    device: int | None,
    stream: int | None,
    pool: tuple[int, int] | None,
    **exports: str | None,
) -> int:
    """Show who holds GPU memory, what fragments it, and why it ran out.

    SNAPSHOT is what torch.cuda.memory._dump_snapshot() wrote: pickle or JSON, plain, .gz or .zst;
    - reads standard input. Several files are shown side by side. Nothing in a file is executed.

    \b
    cudakit memviz snapshot.pkl
    cudakit memviz snapshot.pkl --at oom --html report.html
    cudakit memviz after.pkl --diff before.pkl --fail-on-growth 5%
    cudakit memviz snapshot.pkl --what-if expandable_segments:True --what-if max_split_size_mb:128
    """
    from cudakit.core.memory.analyze import MemorySpec

    spec = MemorySpec(at=at, device=device, stream=stream, pool=pool)
    if settings:
        if before is not None:
            raise click.UsageError("--what-if and --diff are two questions: ask one at a time")
        return _replay(files, spec, settings, memory, output, exports)
    if memory is not None:
        raise click.UsageError("--what-if-limit is a limit for replays: it needs --what-if")
    if before is None:
        if limit is not None:
            raise click.UsageError("--fail-on-growth compares two snapshots: it needs --diff")
        return _show(files, spec, output, exports, top)
    return _compare(files, before, spec, output, exports, top, limit)


def _show(
    files: tuple[str, ...],
    spec: MemorySpec,
    options: OutputOptions,
    exports: Mapping[str, str | None],
    top: int,
) -> int:
    from cudakit.core.memory.analyze import analyze
    from cudakit.core.memory.present import report

    def work() -> MemoryResult:
        return analyze(_load(files, quiet=options.quiet), spec)

    _answer(options, exports, work, partial(report, top=top))
    return ExitCode.OK


def _compare(
    files: tuple[str, ...],
    before: str,
    spec: MemorySpec,
    options: OutputOptions,
    exports: Mapping[str, str | None],
    top: int,
    limit: float | None,
) -> int:
    if len(files) != 1:
        raise click.UsageError("--diff compares one snapshot with one other")
    if spec.at != "peak":
        raise click.UsageError("--diff compares the peaks and the ends: --at has no place in it")
    _refuse_all_but_html(exports, "a difference")
    from cudakit.core.memory.analyze.diff import diff
    from cudakit.core.memory.present.diff import report

    def work() -> DiffResult:
        old, new = _load((before, files[0]), quiet=options.quiet)
        return diff(old, new, spec)

    result = _answer(options, exports, work, partial(report, top=top))
    grew = limit is not None and result.grew_beyond(limit)
    return ExitCode.FINDINGS if grew else ExitCode.OK


def _replay(
    files: tuple[str, ...],
    spec: MemorySpec,
    settings: tuple[str, ...],
    memory: int | None,
    options: OutputOptions,
    exports: Mapping[str, str | None],
) -> int:
    if spec.at != "peak" or spec.stream is not None or spec.pool is not None:
        raise click.UsageError(
            "--what-if replays all of a device: --at, --stream and --pool have no place in it"
        )
    _refuse_all_but_html(exports, "a replay")
    from cudakit.api.memory import replay_snapshots
    from cudakit.core.memory.whatif import WhatIfSpec
    from cudakit.core.memory.whatif.present import report

    def work() -> WhatIfResult:
        asked = WhatIfSpec(settings=settings, limit_bytes=memory, device=spec.device)
        snapshots = _load(files, quiet=options.quiet)
        with progress_line(quiet=options.quiet) as progress:
            return replay_snapshots(snapshots, asked, progress)

    _answer(options, exports, work, report)
    return ExitCode.OK


def _refuse_all_but_html(exports: Mapping[str, str | None], what: str) -> None:
    unfit = [name for name, path in exports.items() if path is not None and name != "html"]
    if unfit:
        raise click.UsageError(f"--{unfit[0]} writes one snapshot, not {what}")


def _answer(
    options: OutputOptions,
    exports: Mapping[str, str | None],
    work: Callable[[], _Result],
    report: Callable[[_Result], Document],
) -> _Result:
    """Open every output, do the work, and write its result.

    The outputs come first: a file that cannot be written fails before the long work.
    """
    with ExitStack() as stack:
        main = stack.enter_context(open_output(options.path, force=options.force))
        opened = {
            name: stack.enter_context(open_output(path, force=options.force))
            for name, path in exports.items()
            if path is not None
        }
        result = work()
        main.answer(result, lambda: report(result), as_json=options.json)
        for name, target in opened.items():
            document = report(result) if name == "html" else _exported(name, result)
            target.write(import_module(f"cudakit.render.{name}").render(document))
    return result


def _load(files: tuple[str, ...], *, quiet: bool) -> list[Snapshot]:
    from cudakit.core.memory.load import load

    snapshots = []
    with progress_line(quiet=quiet) as progress:
        for number, file in enumerate(files):
            progress(f"reading {file}", number / len(files))
            snapshots.append(load(file))
    return snapshots


def _exported(name: str, result: Any) -> Document:
    from cudakit.core.memory.present import exports

    present = {
        "csv": exports.allocations,
        "perfetto": exports.timeline,
        "collapsed": exports.flame,
        "speedscope": exports.flame,
    }
    return present[name](result)
