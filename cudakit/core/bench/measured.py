"""What the runner leaves of one workload: everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cudakit.core.bench.method import Method
from cudakit.core.bench.samples import Samples
from cudakit.core.bench.timer import Reading
from cudakit.core.bench.verification import Verification
from cudakit.gpu.api.facts import Telemetry
from cudakit.units import Unavailable


@dataclass(frozen=True, slots=True)
class Measured:
    """One workload, measured. No figure of it holds unless its verification passed."""

    name: str
    axes: Mapping[str, str | int | float]
    method: Method  # as it was carried out
    samples: Samples  # none where the values that were computed are wrong
    verification: Verification
    stopped: str  # why there are no more: precision, stable, timeout, interrupted, wrong
    settled: bool  # whether clock and times had settled before the first sample
    cold: bool  # whether nothing of a buffer set was in the cache when its turn came
    warmup: tuple[Reading, ...]  # every reading before the first sample
    discarded: tuple[Reading, ...]  # the readings that were no samples
    floor_s: float  # what the timer says of nothing: not subtracted anywhere
    before: Telemetry  # read ahead of the first sample
    after: Telemetry  # and behind the last
    footprint_bytes: int  # of one buffer set
    bytes_moved: int  # of one execution
    operations: int  # likewise
    executions: int  # between ``before`` and ``after``
    energy_j: float | Unavailable  # of one execution
    elapsed_s: float  # from the first sample to the last
    notes: tuple[str, ...]  # what did not go as the method says

    @property
    def broken_off(self) -> bool:
        """Whether there is nothing to go on with."""
        return self.stopped in ("interrupted", "wrong")

    @property
    def interrupted(self) -> bool:
        """Whether the user broke it off."""
        return self.stopped == "interrupted"
