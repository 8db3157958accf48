"""Verify: check the values that a workload computed. No time is reported for wrong values."""

from __future__ import annotations

from cudakit.core.bench.measurement import Samples
from cudakit.core.bench.sample_work import BufferRotation
from cudakit.core.bench.timer import Timer
from cudakit.core.bench.workload import Prepared, Verification
from cudakit.units import Unavailable


def verify(timer: Timer, rotation: BufferRotation, prepared: Prepared) -> Verification:
    """Run every buffer set that was not run since the previous call, and check all outputs.

    The call before the first sample checks the first runs; the call after the last sample checks the samples.
    """
    rotation.complete(timer.stream)
    timer.gpu.sync_stream(timer.stream)
    return prepared.verify()


def reason_to_withhold(
    samples: Samples, verification: Verification | Unavailable
) -> Unavailable | None:
    """Return the reason why a case has no time, or None if it has one."""
    if isinstance(verification, Verification) and not verification.passed:
        why = verification.detail or (
            f"relative error {verification.error:.2g} compared with {verification.against}; "
            f"rounding explains at most {verification.tolerance:.2g}"
        )
        return Unavailable(f"wrong results: {why}")
    return None if samples.times_s else Unavailable("all samples were discarded")
