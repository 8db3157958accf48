"""From the samples of the rounds to the result of a case, with CI, peak, and reasons to doubt it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median

from cudakit.bench.case import (
    NOTHING_TO_VERIFY,
    Case,
    Implementation,
    Method,
    UnsupportedCase,
    Verification,
    worst_verification,
)
from cudakit.bench.environment import Environment, environment, environment_warnings
from cudakit.bench.labels import CUDAKIT, MEASUREMENT_AXIS, Axis
from cudakit.bench.result import CaseResult
from cudakit.bench.roofline import Limit, limit
from cudakit.bench.stats import Samples, Summary, summarize
from cudakit.gpu.api.facts import DeviceFacts, RunContext, Telemetry
from cudakit.units import Unavailable

_NO_VALUES = Unavailable("the case computes no values")
_NO_ENERGY = Unavailable("energy was not measured")
_NO_LIMIT = Unavailable("the peak was not computed")


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of one workload. Its figures are valid only if the verification passed."""

    axes: Mapping[str, Axis]
    settings: Mapping[str, Axis]  # Settings that the workload reports.
    method: Method  # Method with the values that were actually used.
    samples: Samples  # Empty if computed values are wrong.
    verification: Verification
    # Reason why sampling ended: precision, stable, timeout, interrupted or wrong.
    stop_reason: str
    telemetry_before: Telemetry  # Telemetry before the first sample.
    telemetry_after: Telemetry  # Telemetry after the last sample.
    bytes_moved: int  # Bytes that one execution reads and writes.
    operations: int  # Arithmetic operations of one execution.
    energy_j: float | Unavailable  # Energy of one execution.
    warnings: tuple[str, ...]  # Ways in which the measurement differed from its method.

    @property
    def was_interrupted(self) -> bool:
        """Whether the user interrupted the measurement."""
        return self.stop_reason == "interrupted"


def merge_rounds(rounds: Sequence[Measurement], method: Method) -> Measurement:
    """Merge the rounds of one workload. Wrong values in any round leave no samples."""
    first, samples = rounds[0], [measured.samples for measured in rounds]
    reasons = [measured.stop_reason for measured in rounds]
    severe = (it for it in ("wrong", "interrupted", "timeout", "stable") if it in reasons)
    if any(not measured.verification.passed for measured in rounds):
        merged = Samples((), discarded=sum(it.discarded for it in samples), converged=False)
    else:
        has_clocks = all(it.sm_clock_hz for it in samples if it.times_s)
        clocks = chain.from_iterable(it.sm_clock_hz for it in samples)
        merged = Samples(
            times_s=tuple(chain.from_iterable(it.times_s for it in samples)),
            sm_clock_hz=tuple(clocks) if has_clocks else (),
            discarded=sum(it.discarded for it in samples),
            converged=all(it.converged for it in samples),
            rounds=tuple(len(it.times_s) for it in samples) if len(samples) > 1 else (),
        )
    return replace(
        rounds[-1],
        method=replace(
            method,
            warmup_s=sum(measured.method.warmup_s for measured in rounds),
            blocker=all(measured.method.blocker for measured in rounds),
            executions=first.method.executions,
            buffer_sets=first.method.buffer_sets,
            rounds=len(rounds) if len(rounds) > 1 else method.rounds,
        ),
        samples=merged,
        verification=worst_verification(measured.verification for measured in rounds),
        stop_reason=next(severe, reasons[-1]),
        telemetry_before=first.telemetry_before,
        warnings=tuple(dict.fromkeys(chain.from_iterable(it.warnings for it in rounds))),
    )


def summarize_case(
    case: Case,
    implementation: Implementation,
    outcome: Measurement | UnsupportedCase,
    facts: DeviceFacts,
    run_context: RunContext,
    *,
    simulated: bool,
) -> CaseResult:
    """Return the result of one implementation of a case, on the device that ``facts`` of CUDA describe."""
    name, library = case.workload.name, implementation.library
    settings: dict[str, Axis] = {**case.settings}
    if library != CUDAKIT:
        settings["library"] = library
    settings.update(outcome.settings)

    def environment_at(*moments: Telemetry) -> Environment:
        before, after = moments or (None, None)
        return environment(facts, run_context, simulated=simulated, before=before, after=after)

    if isinstance(outcome, UnsupportedCase):
        reason = Unavailable(outcome.message)
        return case_result(
            name,
            implementation.axes,
            Samples((), converged=False),
            method=case.method,
            environment=environment_at(),
            limit=reason,
            verification=reason,
            operation=case.operation,
            library=library,
            settings=settings,
            unsupported=reason,
        )
    stop_reason, samples, verification = outcome.stop_reason, outcome.samples, outcome.verification
    if stop_reason == "timeout" and outcome.method.rule.timeout_s < case.method.rule.timeout_s:
        stop_reason = "budget"
    nvml_device = run_context.nvml_device
    fields = {**(nvml_device.fields if nvml_device else {}), **facts.fields}
    clocks = samples.sm_clock_hz
    clock_hz = median(clocks) if clocks else Unavailable("the clock was not measured")
    return case_result(
        name,
        outcome.axes,
        samples,
        method=outcome.method,
        environment=environment_at(outcome.telemetry_before, outcome.telemetry_after),
        limit=case.work
        if isinstance(case.work, Unavailable)
        else limit(case.work, fields, clock_hz),
        verification=_NO_VALUES if verification is NOTHING_TO_VERIFY else verification,
        operations=outcome.operations,
        operation=case.operation,
        bytes_moved=outcome.bytes_moved,
        energy_j=outcome.energy_j,
        library=library,
        settings=settings,
        stop_reason=stop_reason,
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
    why_no_time = unsupported
    if not why_no_time and isinstance(verification, Verification) and not verification.passed:
        reason = verification.detail or (
            f"the relative error is {verification.error:.2g}, compared with {verification.against}; "
            f"rounding explains at most {verification.tolerance:.2g}"
        )
        why_no_time = Unavailable(f"wrong results: {reason}")
    elif not why_no_time and not samples.times_s:
        why_no_time = Unavailable("all samples were discarded")
    if why_no_time:
        samples = Samples((), discarded=samples.discarded, converged=False)
    summary = why_no_time or summarize(samples)
    median_s = summary.median_s if isinstance(summary, Summary) else summary

    def share(bound: Limit | Unavailable, *, at_datasheet_clock: bool) -> float | Unavailable:
        if isinstance(median_s, Unavailable):
            return median_s
        if isinstance(bound, Unavailable):
            return bound
        bound_s = bound.datasheet_s if at_datasheet_clock else bound.seconds
        return bound_s / median_s if median_s else Unavailable("the measured time is 0")

    return CaseResult(
        name=name,
        axes=dict(axes),
        library=library,
        median_s=median_s,
        ci95_s=summary.ci95_s if isinstance(summary, Summary) else summary,
        samples_s=samples.times_s,
        limit=limit,
        ratio_to_limit=share(limit, at_datasheet_clock=False),
        ratio_to_datasheet=share(limit, at_datasheet_clock=True),
        verified=isinstance(verification, Verification) and verification.passed,
        verification=verification,
        method=method,
        environment=environment,
        sm_clock_hz=samples.sm_clock_hz,
        discarded=samples.discarded,
        converged=samples.converged,
        statistics=summary,
        operations=operations,
        operation=operation,
        bytes_moved=bytes_moved,
        energy_j=why_no_time or energy_j,
        settings=dict(settings or {}),
        rounds=samples.rounds,
        stop_reason=stop_reason,
    )


# --- reasons to doubt a result ------------------------------------------------------------------------

# Kinds of constant data, which needs less power, so that the clock is higher than with real data.
_CONSTANT_FILLS = ("zeros", "ones")


def result_warnings(
    cases: Sequence[CaseResult], titles_by_warning: Mapping[str, Iterable[str]]
) -> Iterator[str]:
    """Yield each reason to doubt the figures once, as text without a capital letter and a full stop.

    ``titles_by_warning`` has the warnings of measurements, each with the titles of the measured cases.
    """
    yield from environment_warnings(environments(cases))
    for fill in dict.fromkeys(case.method.fill for case in cases):
        if fill in _CONSTANT_FILLS:
            yield f"{fill} draw less power than real data, so these rates are too high"
    case_count = len({(case.name, str({**case.axes, MEASUREMENT_AXIS: ""})) for case in cases})
    for warning, titles_of_warning in titles_by_warning.items():
        titles = list(titles_of_warning)
        if len(titles) >= case_count:
            yield warning
        elif len(titles) == 1:
            yield f"{warning} ({titles[0]})"
        else:
            yield f"{warning} ({len(titles)} cases, the first is: {titles[0]})"


def environments(cases: Sequence[CaseResult]) -> list[Environment]:
    """Return one environment per case; libraries whose samples are interleaved share an environment."""
    environment_by_case: dict[tuple[str, str], Environment] = {}
    for case in cases:
        environment_by_case.setdefault((case.name, str(case.axes)), case.environment)
    return [*environment_by_case.values()]
