"""When a comparison makes a command fail: ``--fail-on slower:5%``."""

from __future__ import annotations

from dataclasses import dataclass

from cudakit.core.bench.compare import CaseComparison, Comparison, Verdict
from cudakit.errors import UsageError
from cudakit.units import Unavailable, parse_ratio

_VERDICTS = {verdict.value: verdict for verdict in Verdict if verdict is not Verdict.SAME}


@dataclass(frozen=True, slots=True)
class FailOn:
    """A verdict, and how large the change must be."""

    verdict: Verdict
    threshold: float = 0.0  # of the median; a change of exactly so much does not fail

    def found(self, comparison: Comparison) -> tuple[CaseComparison, ...]:
        """Return the cases that make it fail."""
        return tuple(case for case in comparison.cases if self._meets(case))

    def _meets(self, case: CaseComparison) -> bool:
        if case.verdict is not self.verdict:
            return False
        return isinstance(case.change, Unavailable) or abs(case.change) > self.threshold


def parse_fail_on(text: str) -> FailOn:
    """Read ``slower``, ``slower:5%``, ``faster:0.1`` or ``ambiguous``. Raises UsageError on all else."""
    word, colon, threshold = text.strip().partition(":")
    if word not in _VERDICTS or (colon and not threshold):
        raise UsageError(
            f"--fail-on {text!r} is not understood",
            hint=f"write {', '.join(_VERDICTS)}, or with the least change: slower:5%",
        )
    try:
        ratio = parse_ratio(threshold) if threshold else 0.0
    except ValueError as error:
        raise UsageError(f"--fail-on {text!r}: {error}", hint="write slower:5%") from None
    if ratio > 1 and not threshold.endswith("%"):
        raise UsageError(f"--fail-on {text!r} is ambiguous", hint=f"write {word}:{threshold}%")
    return FailOn(_VERDICTS[word], ratio)
