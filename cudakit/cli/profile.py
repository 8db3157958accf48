"""``cudakit profile``: show a saved profile again, export it, or compare two profiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from cudakit.cli.failure import ExitCode
from cudakit.cli.options import (
    FILE,
    Command,
    Value,
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
    printable,
    progress_line,
    suffixes,
)
from cudakit.errors import UsageError
from cudakit.units import capitalized

if TYPE_CHECKING:
    from cudakit.bench.result import BenchResult
    from cudakit.profile.analysis import DeviceGaps
    from cudakit.profile.findings import MeasuredLimits
    from cudakit.profile.result import ProfileResult
    from cudakit.profile.timeline import Activities
    from cudakit.trace.run_log import Outcome

# Formats that need the activities of a run, which a saved result does not have.
ACTIVITY_FORMATS = (*ROW_FORMATS, *TIMELINE_FORMATS, *STACK_FORMATS)
FORMATS = (*COMMON_FORMATS, *ACTIVITY_FORMATS)
_LOG_HINT = "write a log with: cudakit run --profile --log FILE PROGRAM"


TOP = option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="Rows of each table; 0 shows all.",
)
BY = option(
    "--by",
    type=click.Choice(["kernel", "line", "range"]),
    help="Show only one of the tables Kernels, Lines and NVTX ranges; kernel adds a table of the kernels' "
    "grids.  [default: all three; with --top 0 also the grids]",
)
STEP = option(
    "--step-range",
    metavar="NAME",
    help="NVTX range that is one step of the program; # stands for a number.  [default: a range with step, "
    "iteration or batch in its name; if there is none, the steps of PyTorch's optimizer, or launches that "
    "repeat]",
)
BENCH = option(
    "--bench",
    "bench_files",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="Compare copies and memsets of at least 1 MiB, or kernel launches, with measured limits. "
    "FILE is the JSON result of cudakit bench copy, memory or launch. Repeatable.",
)
_OPTIONS = (
    *option_group("What to show", TOP, BY, STEP, BENCH),
    *option_group(
        "Compare",
        option(
            "--diff",
            "before",
            type=FILE,
            metavar="BEFORE",
            help="Compare with the earlier profile BEFORE by step, kernel and line.",
        ),
        option(
            "--fail-on",
            "limit",
            type=Value(("slower:5%",), growth_limit("slower")),
            metavar="slower:PERCENT",
            help="With --diff: exit with 1 if the median step of a GPU, or without steps its measured time, "
            "is longer by more than PERCENT. Example: slower:5%.",
        ),
    ),
)


@click.command(cls=Command)
@partial(with_options, _OPTIONS)
@output_options(FORMATS, format_limits=f"With --diff: {suffixes(COMMON_FORMATS)}.")
@click.argument("file", metavar="FILE", type=FILE)
def profile(
    *,
    file: str,
    top: int,
    by: Literal["kernel", "line", "range"] | None,
    step_range: str | None,
    bench_files: tuple[str, ...],
    before: str | None,
    limit: float | None,
    output: OutputOptions,
) -> int:
    """Show a profile of cudakit run --profile again, export it, or compare it with another one.

    FILE is a log (cudakit run --profile --log FILE), or a saved result (-o FILE.json). A result has only
    the report; exports of the timeline need a log. The exit code is 0 whatever the report finds; --fail-on
    makes it 1 if the median step of a GPU became slower.

    \b
    cudakit profile profile.log
    cudakit profile profile.log -o profile.html -o profile.trace.json
    cudakit profile new.json --diff old.json --fail-on slower:5%
    """
    if limit is not None and before is None:
        raise click.UsageError("--fail-on slower needs --diff")
    for option_name, value in (("--by", by), ("--bench", bench_files)):
        if before is not None and value:
            raise click.UsageError(f"{option_name} has no effect with --diff")
    with open_outputs(output, FORMATS if before is None else COMMON_FORMATS) as outputs:
        loaded = _load_profile(file, step_range=step_range, quiet=output.quiet)
        if before is not None:
            earlier = _load_profile(before, step_range=step_range, quiet=output.quiet)
            from cudakit.profile import diff as profile_diff

            diff = profile_diff.compare(earlier.result, loaded.result)
            outputs.write(
                Report(
                    result=diff,
                    document=lambda: profile_diff.report(diff, top=top),
                    brief_table=(lambda: profile_diff.step_table(diff))
                    if len(diff.devices) > 1
                    else None,
                )
            )
            growth = diff.slowest_growth()
            is_slower = limit is not None and growth is not None and growth > limit
            return ExitCode.FINDINGS if is_slower else ExitCode.OK
        paths = [path for path in output.paths if path.lower().endswith(ACTIVITY_FORMATS)]
        if loaded.activities is None and paths:
            raise UsageError(
                f"{paths[0]} needs a log: a saved result has no timeline", hint=_LOG_HINT
            )
        if bench_files:
            loaded = replace(loaded, result=with_limits(loaded.result, bench_files))
        outputs.write(loaded.report(top=top, by=by))
        return ExitCode.OK


@dataclass(frozen=True, slots=True)
class Profile:
    """A result and the activities that it was computed from; a saved result has no activities."""

    result: ProfileResult
    activities: Sequence[Activities] | None = None
    gaps: Sequence[DeviceGaps] = ()

    def report(
        self, *, top: int = 10, by: Literal["kernel", "line", "range"] | None = None
    ) -> Report:
        """Return the report in every format; formats of the timeline need activities."""
        from cudakit.profile import exports
        from cudakit.profile import report as present
        from cudakit.report import html

        def page() -> str:
            return html.render(present.page(self.result, activities, self.gaps))

        activities = self.activities or ()
        return Report(
            result=self.result,
            document=lambda: present.report(self.result, top=top, by=by),
            rows=lambda: exports.rows(activities),
            timeline=lambda: exports.trace_timeline(activities),
            stacks=lambda: exports.flames(activities),
            exports={"html": page} if activities else {},
            brief_sentences=lambda: present.brief_sentences(self.result),
        )

    def run_report(self, reason_without_work: str) -> Report:
        """Return the report of ``run --profile``; without GPU work the text is a line per reason."""
        from cudakit.profile.report import NO_WORK

        run_report = self.report()
        if self.result.devices:
            return run_report
        sentences = (
            f"{NO_WORK}, so there is no profile ({reason_without_work})",
            *self.result.incomplete,
            *(note for note in self.result.notes if note != reason_without_work),
        )
        lines = "".join(f"cudakit: {printable(sentence)}\n" for sentence in sentences)
        return replace(
            run_report,
            exports={**run_report.exports, "txt": lambda: lines},
            brief_sentences=lambda: tuple(map(capitalized, sentences)),
        )


def analyze_activities(
    activities: Sequence[Activities], outcome: Outcome, *, step_range: str | None = None
) -> Profile:
    """Return the profile of recorded activities, with kernel names in readable form."""
    from cudakit.gpu.compile import demangle
    from cudakit.profile.analysis import analyze

    activities = [
        replace(process, strings=tuple(map(demangle, process.strings))) for process in activities
    ]
    analysis = analyze(
        activities,
        step_range=step_range,
        exit_status=outcome.exit_status,
        notes=outcome.notes,
        incomplete=outcome.incomplete,
    )
    return Profile(analysis.result, activities, analysis.gaps)


def with_limits(result: ProfileResult, files: Sequence[str]) -> ProfileResult:
    """Add a comparison with the limits in saved results of ``cudakit bench`` to the result of a profile.

    Raises UsageError if a file has no measurement of copies, of memory writes or of launches.
    """
    from cudakit.bench.load import load_result
    from cudakit.profile.findings import compare_limits, why_nothing_compared

    bench_results = [(file, load_result(Path(file))) for file in files]
    compared = replace(result, limits=(), launch_limits=())
    missing_work: list[str] = []
    for is_simulated in (False, True):
        limits = _measured_limits(
            [(file, bench) for file, bench in bench_results if bench.simulated is is_simulated],
            simulated=is_simulated,
        )
        compared = compare_limits(compared, limits)
        missing_work += why_nothing_compared(limits)
    if compared.limits or compared.launch_limits:
        return compared
    note = f"--bench compared nothing: the profile has {', '.join(dict.fromkeys(missing_work))}"
    return replace(compared, notes=(*compared.notes, note))


def _measured_limits(
    bench_results: Iterable[tuple[str, BenchResult]], *, simulated: bool
) -> MeasuredLimits:
    """Return the limits in results of ``cudakit bench``, each with its file."""
    from cudakit.profile.findings import MIN_COPY_BYTES, MeasuredLimits

    copy_rates: dict[str, float] = {}
    write_rates: list[tuple[int, float]] = []
    launch_s: float | None = None
    for file, bench_result in bench_results:
        is_used = False
        for case in bench_result.results:
            size_bytes, time_s = case.axes.get("size_bytes"), case.median_s
            if not isinstance(time_s, float) or time_s <= 0:
                continue
            if case.axes.get("call") == "launch-back-to-back":
                launch_s, is_used = time_s, True
            if not isinstance(size_bytes, int) or size_bytes < MIN_COPY_BYTES:
                continue
            rate = size_bytes / time_s
            if case.name == "copy":
                direction = str(case.axes.get("direction"))
                copy_rates[direction], is_used = max(copy_rates.get(direction, 0.0), rate), True
            elif case.axes.get("operation") == "write":
                write_rates.append((size_bytes, rate))
                is_used = True
        if not is_used:
            raise UsageError(
                f"{file} has no copies or writes of at least 1 MiB, and no back-to-back launches",
                hint="measure them: cudakit bench copy -o copy.json, and the same with launch and memory",
            )
    return MeasuredLimits(copy_rates, write_rates, launch_s, simulated)


def _load_profile(file: str, *, step_range: str | None, quiet: bool) -> Profile:
    from cudakit.profile.timeline import is_saved_result, load_log, load_result

    path = Path(file)
    if is_saved_result(path):
        if step_range is not None:
            raise UsageError(
                "--step-range needs a log: a saved result has no timeline", hint=_LOG_HINT
            )
        return Profile(load_result(path))
    with progress_line(quiet=quiet) as progress:
        profile = analyze_activities(*load_log(path, progress), step_range=step_range)
    devices = profile.result.devices
    if step_range is not None and devices and not any(device.steps.steps for device in devices):
        range_names = sorted(
            {named_range.name for device in devices for named_range in device.ranges}
        )
        raise UsageError(
            f"{file} has no NVTX range {step_range!r} in which work for a GPU was launched",
            hint=f"ranges: {', '.join(range_names)}"
            if range_names
            else "the profile has no NVTX ranges; remove --step-range",
        )
    return profile
