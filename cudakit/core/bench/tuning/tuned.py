"""The result of tuning: an algorithm per GEMM, on one machine. Field order is the order of JSON keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from cudakit.core.bench.load import read_json
from cudakit.core.bench.method import Method
from cudakit.core.bench.tuning.search import Limits, StopReason
from cudakit.core.bench.workload import Verification
from cudakit.errors import InputError
from cudakit.gpu.api.facts import NOT_QUERIED
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings, Library
from cudakit.serialize import Mismatch, from_plain
from cudakit.units import Unavailable

_HINT = "give a file that --tune wrote: cudakit bench gemm --tune -o tuned.json"

# Identifies a search. The settings restrict the algorithms.
Key: TypeAlias = tuple[Gemm, GemmSettings]


@dataclass(frozen=True, slots=True)
class TunedMachine:
    """The device and library for which algorithms were tuned."""

    gpu: str | Unavailable  # name of the model
    compute_capability: str | Unavailable
    library: Library
    library_version: str
    driver: str | Unavailable = NOT_QUERIED
    cudakit: str | Unavailable = NOT_QUERIED

    def differences_from(self, other: TunedMachine) -> Iterator[str]:
        """Yield the differences that invalidate the algorithms or their ranking."""
        for name, tuned, current in (
            ("GPU", self.gpu, other.gpu),
            ("compute capability", self.compute_capability, other.compute_capability),
            ("library", self.library, other.library),
            (f"{self.library} version", self.library_version, other.library_version),
        ):
            if tuned != current:
                yield f"{name}: tuned {_shown(tuned)}, here {_shown(current)}"


@dataclass(frozen=True, slots=True)
class TunedGemm:
    """The result of the search for one GEMM."""

    gemm: Gemm
    shape: str  # name of the shape: "llama3-8b qkv", or ""
    settings: GemmSettings  # restrict the algorithms
    winner: Algorithm  # the default, unless another algorithm is significantly faster
    default: Algorithm  # the library's default
    significant: bool  # whether the winner is not the default
    gain: float | Unavailable  # time saved by the fastest finalist: 0.05 is 5 %
    gain_interval: tuple[float, float] | Unavailable  # CI of the gain
    default_s: float | Unavailable  # median time of one execution, in the same rounds
    default_ci95_s: tuple[float, float] | Unavailable
    winner_s: float | Unavailable
    winner_ci95_s: tuple[float, float] | Unavailable
    verification: Verification  # of the winner, after the last sample
    tried: int  # number of algorithms that were measured
    candidates: int  # number of algorithms that the library listed
    all_listed: bool  # whether the library listed all its algorithms within the time
    wrong: tuple[Algorithm, ...]  # finalists that computed wrong values
    rounds: int  # of the final
    stopped: StopReason  # why the search ended: "complete", "time" or "interrupted"
    limits: Limits
    method: Method
    seed: int  # of data and order

    @property
    def key(self) -> Key:
        """The GEMM and settings of the search."""
        return self.gemm, self.settings


@dataclass(frozen=True, slots=True)
class Untuned:
    """A GEMM without a result."""

    gemm: Gemm
    reason: str
    wrong: bool  # whether the reason is that the default algorithm computes wrong values


@dataclass(frozen=True, slots=True)
class Tuned:
    """The results of one command, and those that it continued from."""

    schema: ClassVar[str] = "cudakit.tuned/1"
    simulated: bool
    time_ns: int  # start, since 1970
    complete: bool  # False after an interrupt
    machine: TunedMachine
    warnings: tuple[str, ...]  # reasons to doubt the results
    gemms: tuple[TunedGemm, ...] = field(metadata={"json": "products"})
    untuned: tuple[Untuned, ...] = ()

    def entries_for(self, machine: TunedMachine) -> Mapping[Key, TunedGemm]:
        """Return the results by key. Raises InputError if they are of another machine."""
        differences = list(self.machine.differences_from(machine))
        if differences:
            raise InputError(
                f"the algorithms were tuned on another machine: {'; '.join(differences)}",
                hint="tune on this machine: cudakit bench gemm --tune -o tuned.json",
            )
        return {entry.key: entry for entry in self.gemms}

    def algorithms_for(
        self, machine: TunedMachine, settings: GemmSettings | None = None
    ) -> Mapping[Gemm, Algorithm]:
        """Return the algorithms that are faster than the default with these settings, or with any for None.

        Raises InputError if they are of another machine.
        """
        return {
            entry.gemm: entry.winner
            for entry in self.entries_for(machine).values()
            if entry.significant and settings in (None, entry.settings)
        }


def _shown(value: str | Unavailable) -> str:
    return "unknown" if isinstance(value, Unavailable) else value


def load_tuned(path: Path) -> Tuned:
    """Read a file that ``cudakit bench gemm --tune -o`` wrote.

    Raises InputError if the file is missing, damaged, of a newer schema or of another kind.
    """
    plain = read_json(path, hint=_HINT)
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if not isinstance(plain, dict) or schema != Tuned.schema:
        raise InputError(
            f"{path} contains no tuned algorithms: its schema is {schema!r} instead of {Tuned.schema!r}",
            hint=_HINT,
        )
    try:
        # Each item is read separately, so that an error names its position in the file.
        for name, kind in (("products", TunedGemm), ("untuned", Untuned)):
            _read_each(kind, plain.get(name), name)
        return from_plain(Tuned, plain)
    except Mismatch as problem:
        raise InputError(f"{path} is damaged: {problem}", hint=_HINT) from None


def _read_each(kind: type[Any], items: object, name: str) -> None:
    """Parse each item; raise Mismatch with the position of the first invalid one."""
    for at, item in enumerate(items if isinstance(items, list) else ()):
        position = f"{name}[{at}]"
        try:
            from_plain(kind, item, position)
        except InputError as problem:
            raise Mismatch(f"{position}: {problem.message}") from None
