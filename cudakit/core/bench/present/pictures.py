"""What a page draws of cases: each under its roof, and beside the same case of a peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cudakit.core.bench.case import OURSELVES
from cudakit.core.bench.present.baselines import Share, baselines, compared, ratio_to
from cudakit.core.bench.present.beside import beside
from cudakit.core.bench.present.cases import rate
from cudakit.core.bench.present.labels import short_labels
from cudakit.core.bench.present.roofline import roofline as roofline_plot
from cudakit.core.bench.result import CaseResult
from cudakit.core.bench.roofline import Limit
from cudakit.document import Column, Columns, Node, Rate, Ratio, Section, Table, Text, View
from cudakit.units import Unavailable


def roofline(cases: Sequence[CaseResult]) -> Iterator[Node]:
    """Place the cases that compute and move data by operations per byte, under what bounds them."""
    placed = [
        (case, case.limit)
        for case in cases
        if case.operations
        and case.bytes_moved
        and isinstance(case.limit, Limit)
        and not isinstance(case.median_s, Unavailable)
        and not isinstance(case.limit.operations_per_s, Unavailable)
        and not isinstance(case.limit.bytes_per_s, Unavailable)
    ]
    if placed:
        columns = _roofline_columns(placed)
        picture = View("roofline", (columns.name,), roofline_plot, _roofline_table(placed))
        yield Section("Roofline", (columns, picture))


def besides(cases: Sequence[CaseResult]) -> Iterator[Node]:
    """Show our rate as a share of each peer's, case by case, with how sure that is."""
    own = [case for case in cases if case.contender == OURSELVES]
    names = short_labels(own)
    for peer in compared(cases):
        found = [
            (name, share)
            for name, case in zip(names, own, strict=True)
            if isinstance(share := ratio_to(peer, case, cases), Share)
        ]
        if found:
            columns = _beside_columns(peer, found)
            picture = View("beside", (columns.name,), beside, _beside_table(peer, found))
            yield Section(f"Beside {peer}", (columns, picture))


def _roofline_columns(placed: Sequence[tuple[CaseResult, Limit]]) -> Columns:
    cases = [case for case, _ in placed]
    limits = [found for _, found in placed]
    kinds = [str(case.axes.get("dtype", case.name)) for case in cases]
    names = list(dict.fromkeys(kinds))
    near = short_labels(cases, without=("dtype",), contender=False)
    who = [OURSELVES, *baselines(cases)]
    units = {case.operation for case in cases}
    return Columns(
        "roofline",
        {
            "case": np.arange(len(placed)),
            "kind": np.array([names.index(kind) for kind in kinds], np.int64),
            "near": np.arange(len(placed)),
            "contender": np.array([who.index(case.contender) for case in cases], np.int64),
            "operations_per_byte": np.array([c.operations / c.bytes_moved for c in cases]),
            "operations_per_s": np.array([_known(c.per_second(c.operations)) for c in cases]),
            "peak_operations_per_s": np.array([_known(one.operations_per_s) for one in limits]),
            "peak_bytes_per_s": np.array([_known(one.bytes_per_s) for one in limits]),
            "unit": np.zeros(len(placed), np.int64),
        },
        {
            "case": tuple(short_labels(cases)),
            "kind": tuple(names),
            "near": tuple(near),
            "contender": tuple(who),
            "unit": (units.pop() if len(units) == 1 else "OP",),
        },
    )


def _roofline_table(placed: Sequence[tuple[CaseResult, Limit]]) -> Table:
    names = short_labels([case for case, _ in placed])
    return Table(
        columns=(
            Column("case", "text"),
            Column("operations per byte", "number"),
            Column("rate", "number"),
            Column("roof", "number"),
            Column("of roof", "bar"),
        ),
        rows=tuple(
            (
                Text(name),
                Text(_number(case.operations / case.bytes_moved)),
                rate(case),
                Rate(case.operations / found.seconds, case.operation),
                Ratio(_known(case.ratio_to_limit)),
            )
            for name, (case, found) in zip(names, placed, strict=True)
        ),
        caption="The roof is the least of peak arithmetic, and bandwidth times operations per byte.",
    )


def _beside_columns(peer: str, found: Sequence[tuple[str, Share]]) -> Columns:
    shares = [share for _, share in found]
    return Columns(
        f"beside {peer}",
        {
            "case": np.arange(len(found)),
            "ratio": np.array([share.ratio for share in shares]),
            "low": np.array([share.low for share in shares]),
            "high": np.array([share.high for share in shares]),
        },
        {"case": tuple(name for name, _ in found)},
    )


def _beside_table(peer: str, found: Sequence[tuple[str, Share]]) -> Table:
    titles = (f"of {peer}", "least", "most")
    return Table(
        columns=(Column("case", "text"), *(Column(title, "number") for title in titles)),
        rows=tuple(
            (Text(name), Ratio(share.ratio), Ratio(share.low), Ratio(share.high))
            for name, share in found
        ),
        caption=f"Our rate as a share of {peer}'s, with what it may be at least and at most.",
    )


def _number(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def _known(value: float | Unavailable) -> float:
    return float("nan") if isinstance(value, Unavailable) else value
