"""Verify: check the values that a workload computed. No time is reported for wrong values."""

from __future__ import annotations

from cudakit.bench.case import PreparedWorkload, Verification
from cudakit.bench.measurement import Samples
from cudakit.bench.sample_work import BufferRotation
from cudakit.bench.timer import SampleTimer
from cudakit.units import Unavailable


def verify(
    timer: SampleTimer, rotation: BufferRotation, prepared_workload: PreparedWorkload
) -> Verification:
    """Execute the workload on every buffer set that was not used since the previous call; check all outputs.

    The pipeline calls this function before the first sample and after the last one, so that the outputs of
    the samples are checked too.
    """
    rotation.complete(timer.stream)
    timer.gpu.sync_stream(timer.stream)
    return prepared_workload.verify()


def reason_to_withhold(
    samples: Samples, verification: Verification | Unavailable
) -> Unavailable | None:
    """Return the reason why a case has no time, or None if the case has a time."""
    if isinstance(verification, Verification) and not verification.passed:
        reason = verification.detail or (
            f"the relative error is {verification.error:.2g}, compared with {verification.against}; "
            f"rounding explains at most {verification.tolerance:.2g}"
        )
        return Unavailable(f"wrong results: {reason}")
    return None if samples.times_s else Unavailable("all samples were discarded")
