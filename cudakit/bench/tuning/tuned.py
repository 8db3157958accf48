"""The result of tuning: an algorithm per GEMM, for one machine. The order of fields is that of JSON keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from cudakit.bench.case import Method, Verification
from cudakit.bench.tuning.search import Limits, StopReason
from cudakit.errors import InputError
from cudakit.gpu.api.facts import NOT_QUERIED
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings, Library
from cudakit.input_files import ExpectedFile, check_schema, read_json
from cudakit.serialize import Mismatch, from_plain
from cudakit.units import Unavailable

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
        """The GEMM and settings of the search."""
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
            _read_each(item_class, document.get(name), name)
        return from_plain(Tuned, document)
    except Mismatch as mismatch:
        raise InputError(f"{path} is damaged: {mismatch}", hint=_TUNED_FILE.hint) from None


def _read_each(item_class: type[Any], plain_items: object, name: str) -> None:
    """Parse each item of a list; raise Mismatch with the position of the first invalid item."""
    for index, plain_item in enumerate(plain_items if isinstance(plain_items, list) else ()):
        position = f"{name}[{index}]"
        try:
            from_plain(item_class, plain_item, position)
        except InputError as error:
            raise Mismatch(f"{position}: {error.message}") from None
