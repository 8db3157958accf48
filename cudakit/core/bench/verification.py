"""Whether what was computed is right: no figure is shown of a computation that is not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verification:
    """A comparison of computed values with a reference of higher precision."""

    passed: bool  # whether the error is within the tolerance and every value was written
    error: float  # Frobenius norm of the difference, relative to that of the reference
    tolerance: float  # the largest error that rounding explains
    against: str  # what the reference is: "float64, 64 rows"
    detail: str = ""  # what is wrong, where it is: "3 values were never written"


# Of what computes no values.
NOTHING_TO_VERIFY = Verification(True, 0.0, 0.0, "nothing")
