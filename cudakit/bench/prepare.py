"""Prepare: allocate, fill and verify the buffers of each workload for one round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TypeAlias

from cudakit.bench.case import ConfiguredWorkload, PreparedWorkload, UnsupportedCase, Workload
from cudakit.bench.l2_cache import buffer_sets
from cudakit.bench.labels import axes_label
from cudakit.bench.measurement import Reading
from cudakit.bench.method import Axis, Method
from cudakit.bench.sample_work import BufferRotation
from cudakit.bench.timer import SampleTimer, SampleWork
from cudakit.bench.verify import verify
from cudakit.errors import Unsupported
from cudakit.units import Unavailable

# A callback that receives the current stage and the fraction that is done; it may raise KeyboardInterrupt.
Progress: TypeAlias = Callable[[str, float], None]

# After this number of timeouts the blocking kernel is no longer used, because a call of the workload must
# be waiting for the device.
MAX_TIMEOUTS = 2


class WorkloadRun:
    """One workload in one round: its buffers, the work of a sample, and the data that each step recorded."""

    def __init__(
        self,
        timer: SampleTimer,
        workload: Workload,
        prepared_workload: PreparedWorkload,
        method: Method,
    ) -> None:
        self.title = axes_label(workload.name, workload.axes)
        self.timer, self.workload, self.prepared_workload, self.method = (
            timer,
            workload,
            prepared_workload,
            method,
        )
        self.settings: Mapping[str, Axis] = (
            dict(prepared_workload.settings)
            if isinstance(prepared_workload, ConfiguredWorkload)
            else {}
        )
        self.is_blocked = method.blocker and method.clock == "device"
        self.timeout_count = 0  # Number of timeouts of the blocking kernel.
        self.rotation = BufferRotation(
            prepared_workload.enqueue, rotate_buffers(timer, prepared_workload, method)
        )
        self.work = SampleWork(self.rotation.run)
        self.verification = verify(timer, self.rotation, prepared_workload)
        # The step warm_up records these attributes.
        self.warmup_readings: list[Reading] = []
        self.warmup_s = 0.0
        self.is_settled = not method.warmup_s
        # The step sample records these attributes.
        self.kept_readings: list[Reading] = []
        self.discarded_readings: list[Reading] = []
        self.accepts_throttled = False  # Whether low clocks persisted and were accepted.
        self.is_converged = False
        self.stop_reason = "" if self.verification.passed else "wrong"
        self.is_sampling = False
        self.begin_s, self.elapsed_s = timer.now_s(), 0.0
        self.begin_execution = self.end_execution = self.rotation.execution_count
        self.telemetry_before = self.telemetry_after = timer.gpu.telemetry()
        # The function measure_energy records this attribute.
        self.energy_j: float | Unavailable = Unavailable("energy was not measured")

    @property
    def is_wrong(self) -> bool:
        """Whether the workload computed wrong values."""
        return not self.verification.passed

    def count_timeout(self, reading: Reading) -> None:
        """Count an invalid reading; after MAX_TIMEOUTS of them, stop using the blocking kernel."""
        self.timeout_count += not reading.valid
        self.is_blocked = self.is_blocked and self.timeout_count < MAX_TIMEOUTS

    def close(self) -> None:
        """Release the work of the samples. The buffers stay until the caller closes the prepared workload."""
        self.work.close()


def prepare(
    timer: SampleTimer, workloads: Sequence[Workload], method: Method, cleanup: ExitStack
) -> list[WorkloadRun]:
    """Allocate, fill and verify the buffers of every workload; ``cleanup`` releases them.

    Raises UnsupportedCase for a workload that the device or a library does not support.
    """
    # Every workload allocates its first buffer set before any workload uses the remaining memory for more
    # sets.
    prepared_workloads = [
        cleanup.enter_context(closing(_prepare_workload(timer, workload, method)))
        for workload in workloads
    ]
    return [
        cleanup.enter_context(closing(WorkloadRun(timer, workload, prepared_workload, method)))
        for workload, prepared_workload in zip(workloads, prepared_workloads, strict=True)
    ]


def _prepare_workload(timer: SampleTimer, workload: Workload, method: Method) -> PreparedWorkload:
    try:
        return workload.prepare(timer.gpu, method.seed)
    except Unsupported as reason:
        raise UnsupportedCase(workload, reason, {}) from reason


def rotate_buffers(timer: SampleTimer, prepared_workload: PreparedWorkload, method: Method) -> int:
    """Allocate the buffer sets that the L2 state needs, and return their number."""
    set_count = buffer_sets(
        method.cache,
        l2_bytes=timer.l2_bytes,
        footprint_bytes=prepared_workload.footprint_bytes,
        free_bytes=timer.gpu.memory_info().free_bytes,
    )
    if set_count > 1:
        prepared_workload.rotate(set_count)
    return set_count
