"""A tuning as a Document: the gain of each GEMM, its CI, and how to use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudakit.core.bench.present.cases import cell
from cudakit.core.bench.present.facts import method_words
from cudakit.core.bench.tuning.significance import LEAST_GAIN, LEVEL
from cudakit.core.bench.tuning.torch_csv import TorchCsv
from cudakit.core.bench.tuning.tuned import Tuned, TunedMachine, TunedProduct
from cudakit.core.bench.workloads.gemm import algorithm_words, gemm_axes
from cudakit.document import (
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
from cudakit.gpu.api.gemm import Gemm
from cudakit.units import Unavailable

_COLUMNS = (
    Column("product", "text"),
    Column("default", "number"),
    Column("tuned", "number"),
    Column("gain", "number"),
    Column("least", "number"),
    Column("most", "number"),
    Column("verdict", "text"),
    Column("algorithm", "text"),
    Column("tried", "number"),
)
_CAPTION = (
    "Gain: what the fastest other algorithm of the final takes less than the library's own choice, in the "
    f"same rounds; it is below least with a probability of {LEVEL:.0%} at most, and above most likewise. "
    f"That algorithm is used where least is above 0 and gain is {LEAST_GAIN:.0%} or more."
)


def present_tuned(
    tuned: Tuned, *, files: Sequence[str] = (), exported: TorchCsv | None = None
) -> Document:
    """Show each GEMM in a row; those that keep the default are faint.

    ``files`` are where the tuning was written to, ``exported`` is what was written for torch.
    """
    nodes: list[Node] = []
    if tuned.products:
        nodes += [_facts(tuned), _table(tuned.products)]
    notes = (*_wrong(tuned), *_doubts(tuned), *_summary(tuned, files), *_torch(exported))
    return Document(_title(tuned), (*nodes, *notes))


def product_words(gemm: Gemm) -> str:
    """Describe a GEMM: ``bf16 8192 x 8192 x 4096 tn``, and what differs from the default."""
    axes = gemm_axes(gemm)
    sizes = " x ".join(str(axes.pop(name)) for name in ("m", "n", "k"))
    first = f"{axes.pop('dtype')} {sizes} {axes.pop('layout')}"
    return ", ".join([first, *(f"{name} {value}" for name, value in axes.items())])


def _title(tuned: Tuned) -> str:
    words = f"{'Simulated: ' if tuned.simulated else ''}bench gemm --tune"
    gpu = tuned.machine.gpu
    return words if isinstance(gpu, Unavailable) else f"{words}, {gpu}"


def _facts(tuned: Tuned) -> Facts:
    words = method_words([product.method for product in tuned.products])
    return Facts((("method", Text(words)), ("library", Text(_library(tuned.machine)))))


def _library(machine: TunedMachine) -> str:
    driver = "" if isinstance(machine.driver, Unavailable) else f", driver {machine.driver}"
    return f"{machine.library} {machine.library_version}{driver}"


def _table(products: Sequence[TunedProduct]) -> Table:
    return Table(
        _COLUMNS,
        tuple(map(_row, products)),
        caption=_CAPTION,
        faint=frozenset(at for at, product in enumerate(products) if not product.significant),
    )


def _row(product: TunedProduct) -> tuple[Value, ...]:
    gain, interval = product.gain, product.gain_interval
    least, most = (interval, interval) if isinstance(interval, Unavailable) else interval
    name = product_words(product.gemm)
    return (
        Text(f"{product.shape}: {name}" if product.shape else name),
        cell(Seconds, product.default_s),
        cell(Seconds, product.winner_s),
        cell(Ratio, gain),
        cell(Ratio, least),
        cell(Ratio, most),
        Text(_verdict(product)),
        Text(algorithm_words(product.winner)),
        Text(_tried(product)),
    )


def _verdict(product: TunedProduct) -> str:
    if product.significant:
        return "faster"
    return "interrupted" if product.stopped == "interrupted" else "no significant gain"


def _tried(product: TunedProduct) -> str:
    return f"{product.tried} of {product.candidates}{'' if product.all_listed else ' or more'}"


def _wrong(tuned: Tuned) -> Iterator[Note]:
    for untuned in tuned.untuned:
        sentence = f"{product_words(untuned.gemm)} was not tuned: {untuned.reason}."
        yield Note("error" if untuned.wrong else "warn", sentence)
    for product in tuned.products:
        for algorithm in product.wrong:
            words = f"{product_words(product.gemm)}: {algorithm_words(algorithm)}"
            yield Note("warn", f"{words} computed wrong values, and is left out.")
        if not product.verification.passed:
            detail = product.verification.detail or "an error beyond rounding"
            yield Note(
                "error",
                f"{product_words(product.gemm)}: the library's own choice computes wrong values: {detail}.",
            )


def _doubts(tuned: Tuned) -> Iterator[Note]:
    if not tuned.complete:
        yield Note(
            "warn",
            "Interrupted: what was not tuned to the end keeps the default.",
            ("go on with --tuned FILE, which keeps what is there",),
        )
    for sentence in tuned.warnings:
        yield Note("warn", f"{sentence[0].upper()}{sentence[1:]}.")
    short = [product for product in tuned.products if product.stopped == "time"]
    if short:
        yield Note(
            "warn",
            f"The time ran out before all algorithms of {_count(len(short))} were tried.",
            ("allow more with --tune-time SEC",),
        )


def _summary(tuned: Tuned, files: Sequence[str]) -> Iterator[Note]:
    if tuned.simulated:
        yield Note("info", "Simulated: nothing here is a measurement of a GPU.")
    faster = sum(product.significant for product in tuned.products)
    if not tuned.products:
        return
    count = _count(len(tuned.products))
    if not faster:
        yield Note("ok", f"No significant gain for {count}: the library's own choice stays.")
        return
    file = files[0] if files else "tuned.json"
    remedies = [f"use them: cudakit bench gemm ... --tuned {file}"]
    if not files:
        remedies.insert(0, "keep them: run again with -o tuned.json")
    yield Note("ok", f"A faster algorithm for {faster} of {count}.", tuple(remedies))


def _torch(exported: TorchCsv | None) -> Iterator[Note]:
    if exported is None:
        return
    yield Note(
        "info",
        "The file for torch is experimental: see that torch takes it.",
        ("PYTORCH_TUNABLEOP_ENABLED=1 PYTORCH_TUNABLEOP_TUNING=0 PYTORCH_TUNABLEOP_VERBOSE=2",),
    )
    for gemm, reason in exported.left_out:
        yield Note("warn", f"{product_words(gemm)} is not in the file for torch: {reason}.")


def _count(number: int) -> str:
    return "1 product" if number == 1 else f"{number} products"
