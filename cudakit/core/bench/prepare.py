"""Prepare: give each workload buffers of its own, filled and verified, and record its run from then on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TypeAlias

from cudakit.core.bench.l2_cache import buffer_sets
from cudakit.core.bench.measurement import Reading
from cudakit.core.bench.method import Method
from cudakit.core.bench.sampler import BufferRotation, Sampler
from cudakit.core.bench.timer import Timer
from cudakit.core.bench.verify import verify
from cudakit.core.bench.workload import Axis, Configured, Prepared, Refused, Workload
from cudakit.errors import Unsupported
from cudakit.units import Unavailable

# Called with the current stage and the fraction that is done; may raise KeyboardInterrupt.
Progress: TypeAlias = Callable[[str, float], None]

# Timeouts of the watchdog after which the blocking kernel is given up: some call waits for the device.
MOST_TIMEOUTS = 2


class WorkloadRun:
    """One workload in one round: its buffers, its sampler, and what each step recorded."""

    def __init__(
        self, timer: Timer, workload: Workload, prepared: Prepared, method: Method
    ) -> None:
        self.title = " ".join([workload.name, *(f"{k}={v}" for k, v in workload.axes.items())])
        self.timer, self.workload, self.prepared, self.method = timer, workload, prepared, method
        self.settings: Mapping[str, Axis] = (
            dict(prepared.settings) if isinstance(prepared, Configured) else {}
        )
        self.is_blocked = method.blocker and not method.at_host
        self.timeouts = 0  # of the blocking kernel
        self.rotation = BufferRotation(prepared.enqueue, rotate_buffers(timer, prepared, method))
        self.sampler: Sampler | None = None
        self.verification = verify(timer, self.rotation, prepared)
        # Recorded by warm_up.
        self.floor_s = 0.0  # time of an empty sample
        self.warmup: list[Reading] = []
        self.warmup_s = 0.0
        self.settled = not method.warmup_s
        # Recorded by sample.
        self.kept: list[Reading] = []
        self.discarded: list[Reading] = []
        self.throttling_counts = False  # whether samples at a low clock were kept in the end
        self.converged = False
        self.stopped = "" if self.verification.passed else "wrong"
        self.is_sampling = False
        self.begin_s, self.elapsed_s = timer.now_s(), 0.0
        self.begin_runs = self.end_runs = self.rotation.runs
        self.before = self.after = timer.gpu.telemetry()
        # Recorded by count_energy.
        self.energy_j: float | Unavailable = Unavailable("no energy was counted")

    @property
    def is_wrong(self) -> bool:
        """Whether wrong values were computed."""
        return not self.verification.passed

    @property
    def executions(self) -> int:
        """Number of executions in a sample."""
        return self.sampler.executions if self.sampler else 1

    def read(self) -> Reading:
        """Take one reading. After MOST_TIMEOUTS of the blocking kernel, go on without it."""
        if self.sampler is None:
            raise AssertionError("samples before the warm-up")
        reading = self.sampler.sample(blocked=self.is_blocked)
        if not reading.valid:
            self.timeouts += 1
            self.is_blocked = self.timeouts < MOST_TIMEOUTS
        return reading

    def close(self) -> None:
        """Release the sampler; the prepared workload is closed by its owner."""
        if self.sampler is not None:
            self.sampler.close()


def prepare(
    timer: Timer, workloads: Sequence[Workload], method: Method, owned: ExitStack
) -> list[WorkloadRun]:
    """Allocate, fill and verify every workload; ``owned`` releases them.

    Raises Refused for a workload that the device or a library does not offer.
    """
    # All are allocated before the first one takes further buffer sets of the memory that is left.
    prepared = [owned.enter_context(closing(_prepare(timer, one, method))) for one in workloads]
    return [
        owned.enter_context(closing(WorkloadRun(timer, workload, ready, method)))
        for workload, ready in zip(workloads, prepared, strict=True)
    ]


def _prepare(timer: Timer, workload: Workload, method: Method) -> Prepared:
    try:
        return workload.prepare(timer.gpu, method.seed)
    except Unsupported as refusal:
        raise Refused(workload, refusal, {}) from refusal


def rotate_buffers(timer: Timer, prepared: Prepared, method: Method) -> int:
    """Allocate the buffer sets that the cache state needs; return their number."""
    sets = buffer_sets(
        method.cache,
        l2_bytes=timer.l2_bytes,
        footprint_bytes=prepared.footprint_bytes,
        free_bytes=timer.gpu.memory_info().free_bytes,
    )
    if sets > 1:
        prepared.rotate(sets)
    return sets
