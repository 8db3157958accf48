"""The result of tuning: an algorithm per GEMM, for one machine. The order of fields is that of JSON keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, TypeAlias

from cudakit.bench.case import Method, Verification
from cudakit.bench.gemm import describe_algorithm, gemm_axes
from cudakit.bench.labels import join_first_names
from cudakit.bench.report.notes import SIMULATED_NOTE, describe_method
from cudakit.bench.report.table import cell
from cudakit.bench.tuning.search import FALSE_POSITIVE_RATE, MIN_GAIN, Limits, StopReason
from cudakit.errors import InputError
from cudakit.gpu.api.facts import NOT_QUERIED
from cudakit.gpu.api.gemm import DATA_TYPES, Algorithm, Gemm, GemmSettings, Library
from cudakit.input_files import ExpectedFile, check_schema, read_json, read_text
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
from cudakit.serialize import Mismatch, from_plain
from cudakit.units import Unavailable, capitalized, format_ratio

_TUNED_FILE = ExpectedFile(
    "a result of cudakit bench gemm --tune",
    "write a result with: cudakit bench gemm --tune -o tuned.json",
)

# The key of a search: the GEMM, and the settings, which restrict the algorithms.
Key: TypeAlias = tuple[Gemm, GemmSettings]


@dataclass(frozen=True, slots=True)
class TunedMachine:
    """The device and library for which algorithms were tuned."""

    gpu: str | Unavailable  # Name of the GPU model.
    compute_capability: str | Unavailable  # compute capability of the GPU
    library: Library  # name of the library
    library_version: str  # version of the library
    driver: str | Unavailable = NOT_QUERIED  # version of the driver
    cudakit: str | Unavailable = NOT_QUERIED  # version of cudakit

    def differences_from(self, other_machine: TunedMachine) -> Iterator[str]:
        """Yield the differences that invalidate the algorithms or their ranking."""
        for name, tuned_value, other_value in (
            ("GPU", self.gpu, other_machine.gpu),
            ("compute capability", self.compute_capability, other_machine.compute_capability),
            ("library", self.library, other_machine.library),
            (f"{self.library} version", self.library_version, other_machine.library_version),
        ):
            if tuned_value != other_value:
                yield f"{name}: tuned {_format(tuned_value)}, here {_format(other_value)}"


@dataclass(frozen=True, slots=True)
class TunedGemm:
    """The result of the search for one GEMM."""

    gemm: Gemm  # the GEMM
    shape: str  # Name of the shape: "llama3-8b qkv", or "".
    settings: GemmSettings  # Settings, which restrict the algorithms.
    winner: Algorithm  # The default, unless another algorithm is significantly faster.
    default: Algorithm  # The library's default algorithm.
    significant: bool  # Whether the winner is not the default.
    gain: float | Unavailable  # Share of the time that the fastest finalist saves: 0.05 is 5%.
    gain_interval: tuple[float, float] | Unavailable  # CI of the gain.
    # Median time of one execution by the default algorithm, in the same rounds as the winner.
    default_s: float | Unavailable
    # 95% CI of the median time of the default algorithm.
    default_ci95_s: tuple[float, float] | Unavailable
    winner_s: float | Unavailable  # median time of the fastest algorithm
    winner_ci95_s: tuple[float, float] | Unavailable  # 95% CI of ``winner_s``
    verification: Verification  # Verification of the winner after the last sample.
    tried: int  # Number of algorithms that were measured.
    candidates: int  # Number of algorithms that the library listed.
    all_listed: bool  # Whether the library listed all its algorithms within the time.
    wrong: tuple[Algorithm, ...]  # Finalists that computed wrong values.
    rounds: int  # Number of rounds of the final.
    stopped: StopReason  # Reason why the search ended: "complete", "time" or "interrupted".
    limits: Limits  # limits of the search
    method: Method  # how the samples were measured
    seed: int  # Seed of the data and of the order of trials.

    @property
    def key(self) -> Key:
        return self.gemm, self.settings


@dataclass(frozen=True, slots=True)
class UntunedGemm:
    """A GEMM that could not be tuned."""

    gemm: Gemm  # the GEMM
    reason: str  # reason why the GEMM was not tuned
    wrong: bool  # Whether the reason is that the default algorithm computes wrong values.


@dataclass(frozen=True, slots=True)
class Tuned:
    """The results of one tuning command, including the earlier results that the command continued from."""

    schema: ClassVar[str] = "cudakit.tuned/1"
    simulated: bool  # whether the device was simulated
    time_ns: int  # Start of the command in nanoseconds since 1970.
    complete: bool  # False if the user interrupted the command.
    machine: TunedMachine  # GPU and versions of the search
    warnings: tuple[str, ...]  # Reasons to doubt the results.
    # GEMMs with the results of their searches.
    gemms: tuple[TunedGemm, ...] = field(metadata={"json": "products"})
    untuned: tuple[UntunedGemm, ...] = ()  # GEMMs that were not tuned, with reasons

    def results_for(self, machine: TunedMachine) -> Mapping[Key, TunedGemm]:
        """Return the results by key. Raises InputError if they were measured on another machine."""
        differences = list(self.machine.differences_from(machine))
        if differences:
            raise InputError(
                f"the algorithms were tuned on another machine: {'; '.join(differences)}",
                hint="tune on this machine: cudakit bench gemm --tune -o tuned.json",
            )
        return {tuned_gemm.key: tuned_gemm for tuned_gemm in self.gemms}

    def algorithms_for(
        self, machine: TunedMachine, settings: GemmSettings | None = None
    ) -> Mapping[Gemm, Algorithm]:
        """Return the algorithms that are faster than the default; ``settings`` None selects all settings.

        Raises InputError if they were tuned on another machine.
        """
        return {
            tuned_gemm.gemm: tuned_gemm.winner
            for tuned_gemm in self.results_for(machine).values()
            if tuned_gemm.significant and settings in (None, tuned_gemm.settings)
        }


def _format(value: str | Unavailable) -> str:
    return "unknown" if isinstance(value, Unavailable) else value


def load_tuned(path: Path) -> Tuned:
    """Read a file that ``cudakit bench gemm --tune -o`` wrote.

    Raises InputError if the file is missing or damaged, or if its schema is newer or not that of a tuning.
    """
    document = check_schema(path, read_json(path, _TUNED_FILE), Tuned.schema, _TUNED_FILE)
    try:
        # Each item is read separately, so that an error names its position in the file.
        for name, item_class in (("products", TunedGemm), ("untuned", UntunedGemm)):
            items = document.get(name)
            for index, item in enumerate(items if isinstance(items, list) else ()):
                position = f"{name}[{index}]"
                try:
                    from_plain(item_class, item, position)
                except InputError as error:
                    raise Mismatch(f"{position}: {error.message}") from None
        return from_plain(Tuned, document)
    except Mismatch as mismatch:
        raise InputError(f"{path} is damaged: {mismatch}", hint=_TUNED_FILE.hint) from None


# --- Tuned algorithms in the experimental file format of ``torch.cuda.tunable`` --------------------
#
# The names are those of torch 2.15 (ATen/cuda/tunable in its wheel: TunableGemm.h, GemmCommon.h,
# GemmCublaslt.h). GEMMs are column-major as in cuBLAS, so ``torch.mm`` of row-major matrices has exchanged
# operands. The format has no comments: torch parses every line.

# Validators that must be in the file. torch checks that their values are those of its own versions.
_TORCH_VALIDATOR, _LIBRARY_VALIDATOR = "PT_VERSION", "CUBLASLT_VERSION"
_TYPE_NAMES = MappingProxyType(
    {"fp64": "double", "fp32": "float", "tf32": "tf32", "fp16": "Half", "bf16": "BFloat16"}
)
_VALIDATORS_FILE = ExpectedFile(
    "a file of torch.cuda.tunable",
    "run torch with PYTORCH_TUNABLEOP_ENABLED=1, which writes such a file",
)
_OPERATOR_BY_EPILOGUE = MappingProxyType({"none": "GemmTunableOp", "bias": "GemmAndBiasTunableOp"})


@dataclass(frozen=True, slots=True)
class TorchCsv:
    """The lines of a file for torch, and the GEMMs that the format cannot express."""

    lines: tuple[str, ...]
    omitted_gemms: tuple[tuple[Gemm, str], ...]  # GEMMs that are not in the file, with the reason.

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


def torch_csv(tuned: Tuned, validators: Mapping[str, str]) -> TorchCsv:
    """Return a file for torch with the GEMMs whose tuned algorithm is faster than the default."""
    lines = [f"Validator,{name},{value}" for name, value in validators.items()]
    omitted_gemms: list[tuple[Gemm, str]] = []
    for tuned_gemm in tuned.gemms:
        if not tuned_gemm.significant:
            continue
        reason = next(_unsupported_properties(tuned_gemm), "")
        if reason:
            omitted_gemms.append((tuned_gemm.gemm, reason))
        else:
            lines.append(_result_line(tuned_gemm))
    return TorchCsv(tuple(lines), tuple(omitted_gemms))


def check_validators(validators: Mapping[str, str], machine: TunedMachine) -> None:
    """Raise InputError if torch would reject the file, or uses another version of the library.

    The parameters of an algorithm are only valid within one version of the library.
    """
    for name in (_TORCH_VALIDATOR, _LIBRARY_VALIDATOR):
        if name not in validators:
            raise InputError(
                f"the validators of torch lack {name}, which torch 2.15 and newer for CUDA write",
                hint="use a file of torch 2.15 or newer",
            )
    torch_version, tuned_version = (
        _version(validators[_LIBRARY_VALIDATOR]),
        _version(machine.library_version),
    )
    if torch_version is not None and tuned_version is not None and torch_version != tuned_version:
        raise InputError(
            f"torch uses cuBLASLt {validators[_LIBRARY_VALIDATOR]}, but {machine.library_version} was tuned",
            hint="tune with the nvidia-cublas that torch was installed with",
        )


def read_validators(path: Path) -> Mapping[str, str]:
    """Return the validators of a file of torch.cuda.tunable. Raises InputError if it has none."""
    lines = read_text(path, _VALIDATORS_FILE).splitlines()
    rows = [line.split(",", 2) for line in lines if line.startswith("Validator,")]
    validators = {row[1]: row[2].strip() for row in rows if len(row) == 3}
    if not validators:
        raise InputError(
            f"{path} has no line that starts with 'Validator,'", hint=_VALIDATORS_FILE.hint
        )
    return validators


def _result_line(tuned_gemm: TunedGemm) -> str:
    gemm, seconds = tuned_gemm.gemm, tuned_gemm.winner_s
    batch = f"_B_{gemm.batch}" if gemm.batch > 1 else ""
    operator = "GemmStridedBatchedTunableOp" if batch else _OPERATOR_BY_EPILOGUE[gemm.epilogue]
    fields = [
        f"{operator}_{_TYPE_NAMES[gemm.dtype]}_{gemm.layout.upper()}",
        f"{gemm.layout}_{gemm.m}_{gemm.n}_{gemm.k}{batch}"
        f"_ld_{gemm.a.leading}_{gemm.b.leading}_{gemm.d.leading}",
        algorithm_name(tuned_gemm.winner),
    ]
    if not isinstance(seconds, Unavailable):
        fields.append(f"{seconds * 1e3:.6g}")
    return ",".join(fields)


def algorithm_name(algorithm: Algorithm) -> str:
    """Return the name of an algorithm in torch."""
    parameter_numbers: Sequence[tuple[str, int]] = (
        ("id", algorithm.id),
        ("tile", algorithm.tile),
        ("stages", algorithm.stages),
        ("splitk", algorithm.split_k),
        ("red", algorithm.reduction),
        ("swizzle", algorithm.swizzle),
        ("custom", algorithm.custom),
        ("inner", algorithm.inner),
        ("cluster", algorithm.cluster),
    )
    return "_".join(["Gemm_Cublaslt", *(f"{name}_{number}" for name, number in parameter_numbers)])


def _unsupported_properties(tuned_gemm: TunedGemm) -> Iterator[str]:
    """Yield the properties of a GEMM that torch cannot express."""
    gemm = tuned_gemm.gemm
    data_type = DATA_TYPES[gemm.dtype]
    if gemm.dtype not in _TYPE_NAMES:
        yield f"torch's names of GEMMs in {gemm.dtype} contain their scales"
    if gemm.epilogue not in _OPERATOR_BY_EPILOGUE:
        yield f"torch's names of GEMMs do not contain the epilogue {gemm.epilogue}"
    if gemm.batch > 1 and gemm.epilogue != "none":
        yield "torch has no batched GEMM with a bias"
    if gemm.padding:
        yield "the GEMM has padding"
    if gemm.output != data_type.outputs[0].name:
        yield f"the output type is {gemm.output}"
    if gemm.accumulate != data_type.accumulators[0]:
        yield f"the accumulation type is {gemm.accumulate}"


def _version(text: str) -> tuple[int, ...] | None:
    """Parse a version such as 13.1.0, or 130100 as cublasLtGetVersion returns; None for other text."""
    if text.isdecimal() and int(text) >= 10_000:
        encoded_version = int(text)
        return encoded_version // 10_000, encoded_version // 100 % 100, encoded_version % 100
    version_numbers = text.split(".")[:3]
    return (
        tuple(map(int, version_numbers))
        if len(version_numbers) == 3 and all(map(str.isdecimal, version_numbers))
        else None
    )


# --- A tuning as a Document: the gain of each GEMM, and how to use the algorithms ------------------

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
    nodes: list[Node] = []
    if tuned.gemms:
        faint_rows = frozenset(i for i, gemm in enumerate(tuned.gemms) if not gemm.significant)
        nodes.append(
            Table(_COLUMNS, tuple(map(_row, tuned.gemms)), _CAPTION, faint_rows=faint_rows)
        )
    nodes += _summary_notes(tuned, files)
    if earlier_tuning:
        earlier_names = [
            describe_gemm(gemm.gemm) for gemm in tuned.gemms if gemm in earlier_tuning.gemms
        ]
        if earlier_names:
            names_text = join_first_names(earlier_names)
            text = f"Searched earlier, results from the file of --tuned: {names_text}."
            nodes.append(Note("info", text))
    nodes += [*_missing_gain_notes(tuned), *_wrong_value_notes(tuned), *_warning_notes(tuned)]
    if torch_csv:
        nodes.append(
            Note(
                "info",
                "The file for torch is experimental. Check with these variables that torch accepts it.",
                (
                    "PYTORCH_TUNABLEOP_ENABLED=1 PYTORCH_TUNABLEOP_TUNING=0 PYTORCH_TUNABLEOP_VERBOSE=2",
                ),
            )
        )
        nodes += [
            Note("warn", f"{describe_gemm(gemm)} was not exported for torch: {reason}.")
            for gemm, reason in torch_csv.omitted_gemms
        ]
    machine = tuned.machine
    if tuned.gemms:
        driver = "" if isinstance(machine.driver, Unavailable) else f", driver {machine.driver}"
        library_text = f"{machine.library} {machine.library_version}{driver}"
        method_text = describe_method([gemm.method for gemm in tuned.gemms])
        nodes.append(Facts((("method", Text(method_text)), ("library", Text(library_text)))))
    title = f"{'Simulated: ' if tuned.simulated else ''}bench gemm --tune"
    if not isinstance(machine.gpu, Unavailable):
        title += f", {machine.gpu}"
    return Document(title, tuple(nodes))


def describe_gemm(gemm: Gemm) -> str:
    """Describe a GEMM: ``bf16 8192×8192×4096 tn``, and parameters that differ from their defaults."""
    axes = gemm_axes(gemm)
    sizes = "×".join(str(axes.pop(name)) for name in ("m", "n", "k"))
    title = f"{axes.pop('dtype')} {sizes} {axes.pop('layout')}"
    return ", ".join([title, *(f"{name} {value}" for name, value in axes.items())])


def _row(tuned_gemm: TunedGemm) -> tuple[Value, ...]:
    name = describe_gemm(tuned_gemm.gemm)
    verdict = "interrupted" if tuned_gemm.stopped == "interrupted" else "no significant gain"
    listed = f"{tuned_gemm.candidates}{'' if tuned_gemm.all_listed else '+'}"
    return (
        Text(f"{tuned_gemm.shape}: {name}" if tuned_gemm.shape else name),
        cell(Seconds, tuned_gemm.default_s),
        cell(Seconds, tuned_gemm.winner_s),
        cell(Ratio, tuned_gemm.gain),
        cell(
            lambda ci: Text(f"{format_ratio(ci[0])} to {format_ratio(ci[1])}"),
            tuned_gemm.gain_interval,
        ),
        Text("faster" if tuned_gemm.significant else verdict),
        Text(describe_algorithm(tuned_gemm.winner)),
        Text(f"{tuned_gemm.tried} of {listed}"),
    )


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


def _count_gemms(count: int) -> str:
    return "1 GEMM" if count == 1 else f"{count} GEMMs"
