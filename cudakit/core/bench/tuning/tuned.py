"""What tuning found: an algorithm for each product, on one machine. Field order is the order of JSON keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from cudakit.core.bench.load import read_json
from cudakit.core.bench.method import Method
from cudakit.core.bench.tuning.search import Limits, Stopped
from cudakit.core.bench.workload import Verification
from cudakit.errors import InputError
from cudakit.gpu.api.facts import NOT_ASKED
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings, Library
from cudakit.serialize import Mismatch, from_plain
from cudakit.units import Unavailable

_HINT = "write one with cudakit bench gemm --tune -o tuned.json"

# Identity of a tuning: the settings restrict the algorithms.
Key: TypeAlias = tuple[Gemm, GemmSettings]


@dataclass(frozen=True, slots=True)
class TunedMachine:
    """What an algorithm is the best on."""

    gpu: str | Unavailable  # name of the product
    compute_capability: str | Unavailable
    library: Library
    library_version: str
    driver: str | Unavailable = NOT_ASKED
    cudakit: str | Unavailable = NOT_ASKED

    def unlike(self, other: TunedMachine) -> Iterator[str]:
        """Yield the differences that invalidate algorithms or their ranking."""
        for what, mine, others in (
            ("the GPU", self.gpu, other.gpu),
            ("the compute capability", self.compute_capability, other.compute_capability),
            ("the library", self.library, other.library),
            (f"the version of {self.library}", self.library_version, other.library_version),
        ):
            if mine != others:
                yield f"{what} was {_shown(mine)}, and is {_shown(others)}"


@dataclass(frozen=True, slots=True)
class TunedProduct:
    """What was found for one product."""

    gemm: Gemm
    shape: str  # what it is of: "llama3-8b qkv"; empty where nobody said
    settings: GemmSettings  # what algorithms were allowed to do
    winner: Algorithm  # to be used: the default, unless another is surely faster
    default: Algorithm  # the library's own choice
    significant: bool  # whether the winner is another than the default
    gain: float | Unavailable  # of the fastest in the final over the default: 0.05 takes 5 % less
    gain_interval: tuple[float, float] | Unavailable  # that covers it
    default_s: float | Unavailable  # median time of one execution, in the same rounds
    default_ci95_s: tuple[float, float] | Unavailable
    winner_s: float | Unavailable
    winner_ci95_s: tuple[float, float] | Unavailable
    verification: Verification  # of the winner, after the last sample
    tried: int  # algorithms that were measured
    candidates: int  # that the library named
    all_listed: bool  # whether these are all that it has; the time may have ended the listing
    wrong: tuple[Algorithm, ...]  # of the best, those that computed wrong values
    rounds: int  # of the final, in each of which finalists and default ran once
    stopped: Stopped  # why the search ended: "complete", "time" or "interrupted"
    limits: Limits
    method: Method
    seed: int  # of data and order

    @property
    def key(self) -> Key:
        """GEMM and settings that it is for."""
        return self.gemm, self.settings


@dataclass(frozen=True, slots=True)
class Untuned:
    """A product for which there is no result."""

    gemm: Gemm
    reason: str
    wrong: bool  # whether it is that the library's own choice computes wrong values


@dataclass(frozen=True, slots=True)
class Tuned:
    """What one command found, and what it went on from."""

    schema: ClassVar[str] = "cudakit.tuned/1"
    simulated: bool  # whether nothing here is of a GPU
    time_ns: int  # when it began, since 1970
    complete: bool  # whether every product was tuned to the end; not after an interrupt
    machine: TunedMachine
    warnings: tuple[str, ...]  # what should make a reader doubt
    products: tuple[TunedProduct, ...]
    untuned: tuple[Untuned, ...] = ()

    def products_on(self, machine: TunedMachine) -> Mapping[Key, TunedProduct]:
        """Return the products by key. Raises InputError for another machine."""
        differences = list(self.machine.unlike(machine))
        if differences:
            raise InputError(
                f"the algorithms were tuned elsewhere: {'; '.join(differences)}",
                hint="tune here: cudakit bench gemm --tune -o tuned.json",
            )
        return {product.key: product for product in self.products}

    def algorithms_for(
        self, machine: TunedMachine, settings: GemmSettings | None = None
    ) -> Mapping[Gemm, Algorithm]:
        """Return the algorithms that beat the default under these settings, or under any for None.

        Raises InputError for another machine.
        """
        return {
            product.gemm: product.winner
            for product in self.products_on(machine).values()
            if product.significant and settings in (None, product.settings)
        }


def _shown(value: str | Unavailable) -> str:
    return "unknown" if isinstance(value, Unavailable) else value


def load_tuned(path: Path) -> Tuned:
    """Read a file that ``cudakit bench gemm --tune -o`` wrote.

    Raises InputError if it is missing, damaged, of a newer schema or another kind of file.
    """
    plain = read_json(path, hint=_HINT)
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if not isinstance(plain, dict) or schema != Tuned.schema:
        raise InputError(
            f"{path} holds no tuning: its schema is {schema!r}, and {Tuned.schema!r} is needed",
            hint=_HINT,
        )
    try:
        # One by one, so that an error names its place in the file.
        for name, kind in (("products", TunedProduct), ("untuned", Untuned)):
            _read_each(kind, plain.get(name), name)
        return from_plain(Tuned, plain)
    except Mismatch as problem:
        raise InputError(f"{path} is damaged: {problem}", hint=_HINT) from None


def _read_each(kind: type[Any], items: object, name: str) -> None:
    """Read each item. Raises Mismatch with the place of an invalid one."""
    for at, item in enumerate(items if isinstance(items, list) else ()):
        place = f"{name}[{at}]"
        try:
            from_plain(kind, item, place)
        except InputError as problem:
            raise Mismatch(f"{place}: {problem.message}") from None
