"""Cases that were not measured, as the device or a library does not offer them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudakit.core.bench.present.axes import varying
from cudakit.core.bench.present.peers import OURSELVES
from cudakit.core.bench.result import CaseResult
from cudakit.units import Unavailable


def measured(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """Return the cases that were run."""
    return [case for case in cases if not case.refused]


def brief(case: CaseResult, cases: Sequence[CaseResult]) -> str:
    """Name a case by what tells it from the others of a result, which say the rest."""
    words = [str(case.axes[name]) for name in varying(cases) if name in case.axes]
    by = [] if case.contender == OURSELVES else [f"by {case.contender}"]
    return " ".join((*words, *by)) or case.name


def by_reason(cases: Sequence[CaseResult]) -> Iterator[tuple[str, list[CaseResult]]]:
    """Yield each reason with the cases that were refused for it."""
    reasons: dict[str, list[CaseResult]] = {}
    for case in cases:
        if case.refused and isinstance(case.median_s, Unavailable):
            reasons.setdefault(case.median_s.reason, []).append(case)
    yield from reasons.items()
