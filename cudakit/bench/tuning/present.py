"""A tuning as a Document: the gain of each GEMM, and how to use the algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudakit.bench.gemm import describe_algorithm, gemm_axes
from cudakit.bench.labels import join_first_names
from cudakit.bench.report.cases import cell
from cudakit.bench.report.facts import describe_method
from cudakit.bench.report.notes import SIMULATED_NOTE
from cudakit.bench.tuning.significance import FALSE_POSITIVE_RATE, MIN_GAIN
from cudakit.bench.tuning.torch_csv import TorchCsv
from cudakit.bench.tuning.tuned import Tuned, TunedGemm, TunedMachine
from cudakit.gpu.api.gemm import Gemm
from cudakit.report.document import (
    Column,
    Document,
    Facts,
    Node,
    Note,
    Ratio,
    Seconds,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable, capitalized, format_ratio

_COLUMNS = (
    Column("GEMM", "text"),
    Column("default", "number"),
    Column("tuned", "number"),
    Column("gain", "number"),
    Column(f"{1 - 2 * FALSE_POSITIVE_RATE:.0%} CI", "number"),
    Column("verdict", "text"),
    Column("algorithm", "text", is_optional=True),
    Column("tried", "number", is_optional=True),
)
_CAPTION = (
    "Gain: time saved by the fastest algorithm compared with the library's default. An "
    "algorithm replaces the default if the CI of the gain is above 0 and the gain is at least"
    f" {MIN_GAIN:.0%}. Algorithm: the fastest, or the default if there is no such"
    " gain. Tried: the number of algorithms that were measured, of "
    "those that the library lists."
)


def present_tuned(
    tuned: Tuned,
    *,
    files: Sequence[str] = (),
    torch_csv: TorchCsv | None = None,
    earlier_tuning: Tuned | None = None,
) -> Document:
    """Return the report of a tuning: a row per GEMM, then notes, then the method.

    ``files`` are the files that were written, ``torch_csv`` is the content of the file for torch.
    ``earlier_tuning`` is the tuning whose complete searches were not repeated.
    """
    nodes: list[Node] = [_table(tuned.gemms)] if tuned.gemms else []
    nodes += _summary_notes(tuned, files)
    nodes += _earlier_search_notes(tuned, earlier_tuning.gemms if earlier_tuning else ())
    nodes += _missing_gain_notes(tuned)
    nodes += [*_wrong_value_notes(tuned), *_warning_notes(tuned)]
    nodes += _torch_notes(torch_csv)
    if tuned.gemms:
        nodes.append(_facts(tuned))
    return Document(_title(tuned), tuple(nodes))


def describe_gemm(gemm: Gemm) -> str:
    """Describe a GEMM: ``bf16 8192×8192×4096 tn``, and parameters that differ from their defaults."""
    axes = gemm_axes(gemm)
    sizes = "×".join(str(axes.pop(name)) for name in ("m", "n", "k"))
    title = f"{axes.pop('dtype')} {sizes} {axes.pop('layout')}"
    return ", ".join([title, *(f"{name} {value}" for name, value in axes.items())])


def _title(tuned: Tuned) -> str:
    title = f"{'Simulated: ' if tuned.simulated else ''}bench gemm --tune"
    gpu_name = tuned.machine.gpu
    return title if isinstance(gpu_name, Unavailable) else f"{title}, {gpu_name}"


def _facts(tuned: Tuned) -> Facts:
    method_text = describe_method([tuned_gemm.method for tuned_gemm in tuned.gemms])
    return Facts((("method", Text(method_text)), ("library", Text(_library(tuned.machine)))))


def _library(machine: TunedMachine) -> str:
    driver_text = "" if isinstance(machine.driver, Unavailable) else f", driver {machine.driver}"
    return f"{machine.library} {machine.library_version}{driver_text}"


def _table(results: Sequence[TunedGemm]) -> Table:
    return Table(
        _COLUMNS,
        tuple(map(_row, results)),
        caption=_CAPTION,
        faint_rows=frozenset(
            index for index, tuned_gemm in enumerate(results) if not tuned_gemm.significant
        ),
    )


def _row(tuned_gemm: TunedGemm) -> tuple[Value, ...]:
    name = describe_gemm(tuned_gemm.gemm)
    return (
        Text(f"{tuned_gemm.shape}: {name}" if tuned_gemm.shape else name),
        cell(Seconds, tuned_gemm.default_s),
        cell(Seconds, tuned_gemm.winner_s),
        cell(Ratio, tuned_gemm.gain),
        cell(_interval, tuned_gemm.gain_interval),
        Text(_verdict(tuned_gemm)),
        Text(describe_algorithm(tuned_gemm.winner)),
        Text(_count_measured(tuned_gemm)),
    )


def _interval(interval: tuple[float, float]) -> Value:
    ci_low, ci_high = interval
    return Text(f"{format_ratio(ci_low)} to {format_ratio(ci_high)}")


def _verdict(tuned_gemm: TunedGemm) -> str:
    if tuned_gemm.significant:
        return "faster"
    return "interrupted" if tuned_gemm.stopped == "interrupted" else "no significant gain"


def _count_measured(tuned_gemm: TunedGemm) -> str:
    return f"{tuned_gemm.tried} of {tuned_gemm.candidates}{'' if tuned_gemm.all_listed else '+'}"


def _missing_gain_notes(tuned: Tuned) -> Iterator[Note]:
    """Yield each reason for a missing gain or CI once, with its GEMMs."""
    gemms_by_reason: dict[tuple[str, str], list[str]] = {}
    for tuned_gemm in tuned.gemms:
        for figure_name, figure in (
            ("gain", tuned_gemm.gain),
            ("CI of the gain", tuned_gemm.gain_interval),
        ):
            if isinstance(figure, Unavailable) and (
                figure_name == "gain" or figure != tuned_gemm.gain
            ):
                gemms_by_reason.setdefault((figure_name, figure.reason), []).append(
                    describe_gemm(tuned_gemm.gemm)
                )
    for (figure_name, reason), gemms in gemms_by_reason.items():
        yield Note("info", f"No {figure_name} for {join_first_names(gemms)}: {reason}.")


def _wrong_value_notes(tuned: Tuned) -> Iterator[Note]:
    for untuned_gemm in tuned.untuned:
        sentence = f"{describe_gemm(untuned_gemm.gemm)} was not tuned: {untuned_gemm.reason}."
        yield Note("error" if untuned_gemm.wrong else "warn", sentence)
    for tuned_gemm in tuned.gemms:
        gemm_text = describe_gemm(tuned_gemm.gemm)
        for algorithm in tuned_gemm.wrong:
            text = f"{gemm_text}: {describe_algorithm(algorithm)} computes wrong values and was excluded."
            yield Note("warn", text)
        if not tuned_gemm.verification.passed:
            error_text = tuned_gemm.verification.detail or "the error exceeds that of rounding"
            text = (
                f"{gemm_text}: the library's default algorithm computes wrong values: {error_text}."
            )
            yield Note("error", text)


def _warning_notes(tuned: Tuned) -> Iterator[Note]:
    if not tuned.complete:
        yield Note(
            "warn",
            "Interrupted: GEMMs without a complete search keep the default algorithm.",
            ("continue with --tune --tuned FILE, which keeps the complete searches",),
        )
    for sentence in tuned.warnings:
        yield Note("warn", f"{capitalized(sentence)}.")
    timed_out_gemms = [gemm for gemm in tuned.gemms if gemm.stopped == "time"]
    if timed_out_gemms:
        yield Note(
            "warn",
            "The time limit ended the search before all algorithms of "
            f"{_count_gemms(len(timed_out_gemms))} were measured.",
            ("allow more time with --tune-time SEC",),
        )


def _summary_notes(tuned: Tuned, files: Sequence[str]) -> Iterator[Note]:
    if tuned.simulated:
        yield Note("info", SIMULATED_NOTE)
    faster_count = sum(tuned_gemm.significant for tuned_gemm in tuned.gemms)
    if not tuned.gemms:
        return
    gemm_count_text = _count_gemms(len(tuned.gemms))
    if not faster_count:
        searched_count = sum(tuned_gemm.stopped != "interrupted" for tuned_gemm in tuned.gemms)
        if searched_count:
            text = f"No significant gain for {_count_gemms(searched_count)}: the default algorithm is used."
            yield Note("ok", text)
        return
    tuned_file = files[0] if files else "tuned.json"
    remedies = [f"use the algorithms: cudakit bench gemm ... --tuned {tuned_file}"]
    if not files:
        remedies.insert(0, "save the algorithms: add -o tuned.json")
    yield Note(
        "ok", f"Found a faster algorithm for {faster_count} of {gemm_count_text}.", tuple(remedies)
    )


def _earlier_search_notes(tuned: Tuned, earlier_results: Sequence[TunedGemm]) -> Iterator[Note]:
    earlier_names = [
        describe_gemm(tuned_gemm.gemm)
        for tuned_gemm in tuned.gemms
        if tuned_gemm in earlier_results
    ]
    if earlier_names:
        yield Note(
            "info",
            f"Searched earlier, results from the file of --tuned: {join_first_names(earlier_names)}.",
        )


def _torch_notes(torch_csv: TorchCsv | None) -> Iterator[Note]:
    if torch_csv is None:
        return
    yield Note(
        "info",
        "The file for torch is experimental. Check with these variables that torch accepts it.",
        ("PYTORCH_TUNABLEOP_ENABLED=1 PYTORCH_TUNABLEOP_TUNING=0 PYTORCH_TUNABLEOP_VERBOSE=2",),
    )
    for gemm, reason in torch_csv.omitted_gemms:
        yield Note("warn", f"{describe_gemm(gemm)} was not exported for torch: {reason}.")


def _count_gemms(count: int) -> str:
    return "1 GEMM" if count == 1 else f"{count} GEMMs"
