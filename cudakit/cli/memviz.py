"""``cudakit memviz``: explain GPU memory from snapshot files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cudakit.cli.failure import ExitCode
from cudakit.cli.options import (
    FILE,
    Command,
    Value,
    byte_size,
    growth_limit,
    option,
    option_group,
    output_options,
    with_options,
)
from cudakit.cli.output import (
    COMMON_FORMATS,
    ROW_FORMATS,
    STACK_FORMATS,
    TIMELINE_FORMATS,
    OutputOptions,
    Report,
    open_outputs,
    progress_line,
    suffixes,
)

if TYPE_CHECKING:
    from cudakit.memory.result import DiffResult, FileFacts, WhatIfResult
    from cudakit.memory.selection import MemorySpec
    from cudakit.memory.snapshot import Snapshot

# Formats of the report on snapshots; comparisons and replays have the common formats only.
_FORMATS = (*COMMON_FORMATS, *ROW_FORMATS, *TIMELINE_FORMATS, *STACK_FORMATS)


def _selection_parser(name: str) -> Callable[[str], Any]:
    """Return a function of ``cudakit.memory.selection``, which is imported at its first call."""

    def parse(text: str) -> Any:
        from cudakit.memory import selection

        return getattr(selection, name)(text)

    return parse


_VIEW_OPTIONS = option_group(
    "What to show",
    option(
        "--at",
        type=Value(("peak", "end", "oom"), _selection_parser("parse_moment")),
        default="peak",
        show_default=True,
        metavar="WHEN",
        help="Moment that the tables show: peak, end, oom (the last failed allocation), or an event index.",
    ),
    option(
        "--device",
        type=Value(("0", "cuda:0", "host"), _selection_parser("parse_device")),
        metavar="DEVICE",
        help="Show one device only: 0, cuda:0, or host (pinned memory).",
    ),
    option(
        "--stream", type=int, metavar="N", help="Show only stream N, as numbered in the report."
    ),
    option(
        "--pool",
        type=Value(("default", "cupy", "driver"), _selection_parser("parse_pool")),
        metavar="POOL",
        help="Show one pool only: its name in the report, such as default or cupy, or its two numbers, such "
        "as 0,1.",
    ),
    option(
        "--top",
        type=click.IntRange(min=0),
        default=10,
        show_default=True,
        metavar="N",
        help="Rows of each table, except those of files, replays and the layout; 0 shows all.",
    ),
    option(
        "--summary",
        is_flag=True,
        help="Show only the summary: the state, the cause and the action. JSON stays complete.",
    ),
)
_DIFF_OPTIONS = option_group(
    "Compare",
    option(
        "--diff",
        "before",
        type=FILE,
        metavar="BEFORE",
        help="Compare with the earlier snapshot BEFORE.",
    ),
    option(
        "--fail-on",
        "limit",
        type=Value(("growth:5%",), growth_limit("growth")),
        metavar="growth:PERCENT",
        help="With --diff: exit with 1 if requested memory grew by more than PERCENT, at the peak or at the "
        "end. Example: growth:5%.",
    ),
)
_WHAT_IF_OPTIONS = option_group(
    "Replay",
    option(
        "--what-if",
        "settings",
        type=Value(
            ("expandable_segments:True", "max_split_size_mb:", "garbage_collection_threshold:")
        ),
        multiple=True,
        metavar="SETTINGS",
        help="Replay the trace with other allocator settings, in the format of PYTORCH_CUDA_ALLOC_CONF; "
        "'' stands for the default settings. Repeatable.",
    ),
    option(
        "--what-if-limit",
        "memory",
        type=byte_size,
        metavar="SIZE",
        help="With --what-if: memory limit of the replays. Example: 80GiB.",
    ),
)


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="SNAPSHOT...", type=FILE)
@partial(with_options, (*_VIEW_OPTIONS, *_DIFF_OPTIONS, *_WHAT_IF_OPTIONS))
@output_options(
    _FORMATS,
    format_limits=f"With --diff or --what-if: {suffixes(COMMON_FORMATS)}.",
)
def memviz(
    *,
    files: tuple[str, ...],
    top: int,
    before: str | None,
    limit: float | None,
    settings: tuple[str, ...],
    memory: int | None,
    output: OutputOptions,
    at: str | int,  # moment to show: "peak", "end", "oom" or an event index
    device: int | None,
    stream: int | None,
    pool: tuple[int, int] | None,
    summary: bool,
) -> int:
    """Explain GPU memory from a snapshot: failed allocations, largest call sites, fragmentation, leaks.

    SNAPSHOT is a file that cudakit run --memory or torch.cuda.memory._dump_snapshot() wrote: pickle or JSON,
    plain, .gz or .zst; - is standard input. Several files, such as the ranks of a job, are compared. Nothing
    in a file is executed. The exit code is 0 even if the report finds a problem; with --fail-on, it is 1 if
    memory grew.

    \b
    cudakit memviz snapshot.pkl
    cudakit memviz snapshot.pkl --at oom -o report.html
    cudakit memviz after.pkl --diff before.pkl --fail-on growth:5%
    cudakit memviz snapshot.pkl --what-if expandable_segments:True
    """
    from cudakit.memory.selection import MemorySpec

    spec = MemorySpec(at=at, device=device, stream=stream, pool=pool)
    mode = "--what-if" if settings else "--diff" if before else "--summary" if summary else ""
    for name, reason in _REASONS_WITHOUT_EFFECT.get(mode, {}).items():
        source = click.get_current_context().get_parameter_source(name)
        if source is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{mode} {reason}; remove --{name}")
    if memory == 0:
        raise click.UsageError("--what-if-limit must be at least 1 byte")
    if settings:
        if before is not None:
            raise click.UsageError("--what-if and --diff cannot be combined")
        if limit is not None:
            raise click.UsageError("--fail-on growth needs --diff; remove --what-if")
        return _replay(files, spec, settings, memory, output)
    if memory is not None:
        raise click.UsageError("--what-if-limit needs --what-if")
    if before is None:
        if limit is not None:
            raise click.UsageError("--fail-on growth needs --diff")
        return _show(files, spec, output, top, summary_only=summary)
    return _compare(files, before, spec, output, top, limit)


# The reason why an option has no effect with another one.
_REASONS_WITHOUT_EFFECT = MappingProxyType(
    {
        "--what-if": {
            "at": "replays the whole trace",
            "stream": "replays the whole device",
            "pool": "replays the whole device",
            "top": "shows all rows of its tables",
            "summary": "has no summary",
        },
        "--diff": {"at": "always compares the peak and the end", "summary": "has no summary"},
        "--summary": {"top": "shows no tables"},
    }
)


def _show(
    files: tuple[str, ...],
    spec: MemorySpec,
    options: OutputOptions,
    top: int,
    *,
    summary_only: bool,
) -> int:
    from cudakit.api.memory import new_allocator
    from cudakit.memory.analyze import analyze
    from cudakit.memory.report import brief_sentences, exports, report, summary_report

    with open_outputs(options) as outputs:
        result = analyze(_load_snapshots(files, quiet=options.quiet), spec, new_allocator)
        outputs.write(
            Report(
                result=result,
                document=lambda: (
                    summary_report(result, spec) if summary_only else report(result, spec, top=top)
                ),
                rows=lambda: exports.allocations(result),
                timeline=lambda: exports.timeline(result),
                stacks=lambda: exports.flames(result),
                brief_sentences=lambda: brief_sentences(result),
            )
        )
    _note_slow_reader(result.files, options)
    return ExitCode.OK


def _compare(
    files: tuple[str, ...],
    before: str,
    spec: MemorySpec,
    options: OutputOptions,
    top: int,
    limit: float | None,
) -> int:
    if len(files) != 1:
        raise click.UsageError("--diff compares one SNAPSHOT with BEFORE; name one SNAPSHOT")
    from cudakit.memory.analyze import diff
    from cudakit.memory.report.comparison import diff_report

    with open_outputs(options, COMMON_FORMATS) as outputs:
        before_snapshot, after_snapshot = _load_snapshots((before, files[0]), quiet=options.quiet)
        result: DiffResult = diff(before_snapshot, after_snapshot, spec)
        outputs.write(Report(result=result, document=lambda: diff_report(result, top=top)))
    _note_slow_reader((result.before, result.after), options)
    has_grown = limit is not None and result.grew_beyond(limit)
    return ExitCode.FINDINGS if has_grown else ExitCode.OK


def _replay(
    files: tuple[str, ...],
    spec: MemorySpec,
    settings: tuple[str, ...],
    limit_bytes: int | None,
    options: OutputOptions,
) -> int:
    from cudakit.api.memory import replay_snapshots
    from cudakit.memory.report.comparison import what_if_report, what_if_sentences
    from cudakit.memory.whatif import WhatIfSpec

    with open_outputs(options, COMMON_FORMATS) as outputs:
        what_if_spec = WhatIfSpec(settings=settings, limit_bytes=limit_bytes, device=spec.device)
        snapshots = _load_snapshots(files, quiet=options.quiet)
        with progress_line(quiet=options.quiet) as progress:
            result: WhatIfResult = replay_snapshots(snapshots, what_if_spec, progress)
        outputs.write(
            Report(
                result=result,
                document=lambda: what_if_report(result),
                brief_sentences=lambda: what_if_sentences(result),
            )
        )
    _note_slow_reader(result.files, options)
    return ExitCode.OK


def _load_snapshots(files: tuple[str, ...], *, quiet: bool) -> list[Snapshot]:
    from cudakit.api.memory import load_snapshot

    if files.count("-") > 1:
        raise click.UsageError("standard input (-) can be read only once")
    snapshots = []
    with progress_line(quiet=quiet) as progress:
        for file_index, file in enumerate(files):
            progress(f"reading {file}", file_index / len(files))
            snapshots.append(load_snapshot(file))
    return snapshots


def _note_slow_reader(files: Sequence[FileFacts], options: OutputOptions) -> None:
    from cudakit.memory.load.pickled import HAS_COMPILED_READER

    has_pickle = any(file.format == "pickle" for file in files)
    if has_pickle and not options.quiet and not HAS_COMPILED_READER:
        click.echo(
            "note: the report took about 10 times longer, because cudakit was installed without a C compiler;"
            " install one and reinstall cudakit",
            err=True,
        )
