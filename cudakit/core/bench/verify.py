"""Verify: check the values that a workload computed. A wrong value withholds the figure of its case."""

from __future__ import annotations

from cudakit.core.bench.measurement import Samples
from cudakit.core.bench.sampler import BufferRotation
from cudakit.core.bench.timer import Timer
from cudakit.core.bench.workload import Prepared, Verification
from cudakit.units import Unavailable


def verify(timer: Timer, rotation: BufferRotation, prepared: Prepared) -> Verification:
    """Run every buffer set that was not run since the previous check, and check all outputs.

    The check before the first sample covers the first runs; the check after the last covers the samples'.
    """
    rotation.complete(timer.stream)
    timer.gpu.sync_stream(timer.stream)
    return prepared.verify()


def reason_to_withhold(
    samples: Samples, verification: Verification | Unavailable
) -> Unavailable | None:
    """Return why a case has no figures, or None if it has."""
    if isinstance(verification, Verification) and not verification.passed:
        why = verification.detail or (
            f"error {verification.error:.2g} against {verification.against}, "
            f"at most {verification.tolerance:.2g} is rounding"
        )
        return Unavailable(f"the computed values are wrong: {why}")
    return None if samples.times_s else Unavailable("no sample could be kept")
