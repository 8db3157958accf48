"""Summarize: turn the readings of a run into a result with CI, peak and warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

from cudakit.bench.case import (
    NOTHING_TO_VERIFY,
    Case,
    Implementation,
    UnsupportedCase,
    Verification,
)
from cudakit.bench.environment import Environment, environment
from cudakit.bench.l2_cache import is_cold
from cudakit.bench.measurement import Measurement, Samples
from cudakit.bench.method import CUDAKIT, Axis, Method
from cudakit.bench.prepare import WorkloadRun
from cudakit.bench.result import CaseResult
from cudakit.bench.roofline import Limit, Work, limit
from cudakit.bench.stats import Summary, summarize
from cudakit.bench.verify import reason_to_withhold
from cudakit.gpu.api.facts import DeviceFacts, RunContext, Telemetry
from cudakit.units import Unavailable

_NO_VALUES = Unavailable("the case computes no values")
_NO_ENERGY = Unavailable("energy was not measured")
_NO_LIMIT = Unavailable("the peak was not computed")


def summarize_run(run: WorkloadRun) -> Measurement:
    """Return the Measurement of one round, without samples if the values are wrong."""
    return Measurement(
        name=run.workload.name,
        axes=dict(run.workload.axes),
        settings=run.settings,
        method=replace(
            run.method,
            warmup_s=run.warmup_s,
            blocker=run.is_blocked,
            executions=run.work.executions,
            buffer_sets=run.rotation.set_count,
        ),
        samples=_samples(run),
        verification=run.verification,
        stop_reason="wrong" if run.is_wrong else run.stop_reason,
        is_settled=run.is_settled,
        is_cold=_is_cold(run),
        warmup_readings=tuple(run.warmup_readings),
        discarded_readings=tuple(run.discarded_readings),
        telemetry_before=run.telemetry_before,
        telemetry_after=run.telemetry_after,
        footprint_bytes=run.prepared_workload.footprint_bytes,
        bytes_moved=run.prepared_workload.bytes_moved,
        operations=run.prepared_workload.operations,
        executions=run.end_execution - run.begin_execution,
        energy_j=run.energy_j,
        elapsed_s=run.elapsed_s,
        warnings=tuple(_run_warnings(run)),
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and the run context, which results record."""

    simulated: bool
    facts: DeviceFacts  # Facts that CUDA reports.
    run_context: RunContext

    def environment(
        self, telemetry_before: Telemetry | None = None, telemetry_after: Telemetry | None = None
    ) -> Environment:
        """Return the Environment of a result, with telemetry before the first and after the last sample."""
        return environment(
            self.facts,
            self.run_context,
            simulated=self.simulated,
            before=telemetry_before,
            after=telemetry_after,
        )

    def limit(self, work: Work | Unavailable, samples: Samples) -> Limit | Unavailable:
        """Return the roofline of the work at the median clock of the samples."""
        if isinstance(work, Unavailable):
            return work
        nvml_device = self.run_context.nvml_device
        clocks = samples.sm_clock_hz
        clock = median(clocks) if clocks else Unavailable("the clock was not measured")
        return limit(
            work, {**(nvml_device.fields if nvml_device else {}), **self.facts.fields}, clock
        )


def summarize_case(
    machine: Machine,
    case: Case,
    implementation: Implementation,
    outcome: Measurement | UnsupportedCase,
) -> CaseResult:
    """Return the result of one implementation of a case."""
    if isinstance(outcome, UnsupportedCase):
        return _unsupported_result(machine, case, implementation, outcome)
    verification = outcome.verification
    return case_result(
        case.workload.name,
        outcome.axes,
        outcome.samples,
        method=outcome.method,
        environment=machine.environment(outcome.telemetry_before, outcome.telemetry_after),
        limit=machine.limit(case.work, outcome.samples),
        verification=_NO_VALUES if verification is NOTHING_TO_VERIFY else verification,
        operations=outcome.operations,
        operation=case.operation,
        bytes_moved=outcome.bytes_moved,
        energy_j=outcome.energy_j,
        library=implementation.library,
        settings=_settings(case, implementation, outcome.settings),
        stop_reason=_stop_reason(case, outcome),
    )


def _stop_reason(case: Case, outcome: Measurement) -> str:
    """Return why sampling ended; ``budget`` if the time budget made the timeout of the case shorter."""
    is_shortened = outcome.method.rule.timeout_s < case.method.rule.timeout_s
    return "budget" if outcome.stop_reason == "timeout" and is_shortened else outcome.stop_reason


def _unsupported_result(
    machine: Machine, case: Case, implementation: Implementation, reason: UnsupportedCase
) -> CaseResult:
    """Return a result in which all figures are Unavailable for the same reason."""
    unavailable_figure = Unavailable(reason.message)
    return case_result(
        case.workload.name,
        implementation.axes,
        Samples((), converged=False),
        method=case.method,
        environment=machine.environment(),
        limit=unavailable_figure,
        verification=unavailable_figure,
        operation=case.operation,
        library=implementation.library,
        settings=_settings(case, implementation, reason.settings),
        unsupported=unavailable_figure,
    )


def case_result(
    name: str,
    axes: Mapping[str, Axis],
    samples: Samples,
    *,
    method: Method,
    environment: Environment,
    limit: Limit | Unavailable = _NO_LIMIT,
    verification: Verification | Unavailable = _NO_VALUES,
    operations: float = 0.0,
    operation: str = "FLOP",
    bytes_moved: float = 0.0,
    energy_j: float | Unavailable = _NO_ENERGY,
    library: str = CUDAKIT,
    settings: Mapping[str, Axis] | None = None,
    unsupported: Unavailable | None = None,
    stop_reason: str = "",
) -> CaseResult:
    """Return the result of a case.

    The result has no time if the case is unsupported, if its verification failed, or if it has no samples.
    """
    why_no_time = unsupported or reason_to_withhold(samples, verification)
    reported_samples = (
        Samples((), discarded=samples.discarded, converged=False) if why_no_time else samples
    )
    summary = why_no_time or summarize(reported_samples)
    median_s = summary.median_s if isinstance(summary, Summary) else summary
    return CaseResult(
        name=name,
        axes=dict(axes),
        library=library,
        median_s=median_s,
        ci95_s=summary.ci95_s if isinstance(summary, Summary) else summary,
        samples_s=reported_samples.times_s,
        limit=limit,
        ratio_to_limit=_share_of_peak(limit, median_s),
        ratio_to_datasheet=_share_of_peak(limit, median_s, at_datasheet_clock=True),
        verified=isinstance(verification, Verification) and verification.passed,
        verification=verification,
        method=method,
        environment=environment,
        sm_clock_hz=reported_samples.sm_clock_hz,
        discarded=reported_samples.discarded,
        converged=reported_samples.converged,
        statistics=summary,
        operations=operations,
        operation=operation,
        bytes_moved=bytes_moved,
        energy_j=why_no_time or energy_j,
        settings=dict(settings or {}),
        rounds=reported_samples.rounds,
        stop_reason=stop_reason,
    )


def _samples(run: WorkloadRun) -> Samples:
    kept_readings, discarded_count = run.kept_readings, len(run.discarded_readings)
    if run.is_wrong:
        return Samples((), discarded=discarded_count, converged=False)
    clocks = tuple(
        reading.sm_clock_hz for reading in kept_readings if reading.sm_clock_hz is not None
    )
    return Samples(
        times_s=tuple(reading.time_s for reading in kept_readings),
        sm_clock_hz=clocks if len(clocks) == len(kept_readings) else (),
        discarded=discarded_count,
        converged=run.is_converged,
    )


def _is_cold(run: WorkloadRun) -> bool:
    if run.method.cache != "rotate":
        return run.method.cache == "flush"
    footprint_bytes = run.prepared_workload.footprint_bytes
    if not footprint_bytes:
        return True
    return is_cold(
        run.rotation.set_count, l2_bytes=run.timer.l2_bytes, footprint_bytes=footprint_bytes
    )


def _run_warnings(run: WorkloadRun) -> Iterator[str]:
    """Yield a warning for each way in which a run differed from its measurement method."""
    if run.timeout_count and not run.is_blocked:
        yield "samples include launch gaps, because a call waited for the device and the blocker timed out"
    if run.accepts_throttled:
        yield "samples include a throttled clock, because the clock stayed low"
    if run.method.cache == "rotate" and not _is_cold(run):
        yield "L2 is not cold: the buffer sets are too small to overwrite the cache"
    if not run.is_settled:
        yield "clock and times were not stable at the end of the warm-up"


def _settings(
    case: Case, implementation: Implementation, workload_settings: Mapping[str, Axis]
) -> Mapping[str, Axis]:
    """Combine the settings of the case, the library, and the settings that the workload reports."""
    is_cudakit = implementation.library == CUDAKIT
    return {
        **case.settings,
        **({} if is_cudakit else {"library": implementation.library}),
        **workload_settings,
    }


def _share_of_peak(
    limit: Limit | Unavailable, median_s: float | Unavailable, *, at_datasheet_clock: bool = False
) -> float | Unavailable:
    if isinstance(median_s, Unavailable):
        return median_s
    if isinstance(limit, Unavailable):
        return limit
    bound_s = limit.datasheet_s if at_datasheet_clock else limit.seconds
    return bound_s / median_s if median_s else Unavailable("the measured time is 0")
