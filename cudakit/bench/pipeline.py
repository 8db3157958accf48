"""The pipeline of a bench: plan > prepare > warm_up > sample > verify > summarize, a module each.

``run`` measures the cases of a Spec. ``measure_case`` measures one case and its baselines in rounds, and
``measure_round`` performs the steps of one round.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

from cudakit.bench.case import Case, Implementation, UnsupportedCase, Workload, check_fit
from cudakit.bench.energy import measure_energy
from cudakit.bench.measurement import Measurement, merge_rounds
from cudakit.bench.method import Method
from cudakit.bench.plan import (
    plan_cases,
    plan_method,
    round_methods,
    share_budget,
    without_settling,
)
from cudakit.bench.prepare import Progress, WorkloadRun, prepare
from cudakit.bench.result import BenchResult, CaseResult
from cudakit.bench.sample import end_sampling, sample
from cudakit.bench.spec import Spec
from cudakit.bench.summarize import Machine, summarize_case, summarize_run
from cudakit.bench.timer import SampleTimer, Timer
from cudakit.bench.verify import verify
from cudakit.bench.warm_up import warm_up
from cudakit.bench.warnings import result_warnings
from cudakit.errors import CollectiveError, StorageError, Unsupported
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import RunContext
from cudakit.units import format_seconds

_NO_SAMPLES = "all samples were discarded, so there is no time"

# The result of measuring one implementation; None if all its samples were discarded.
Outcome: TypeAlias = Measurement | UnsupportedCase | None


class _MeasuredCase(NamedTuple):
    case: Case
    implementation: Implementation
    outcome: Outcome

    @property
    def was_interrupted(self) -> bool:
        return isinstance(self.outcome, Measurement) and self.outcome.was_interrupted


def no_progress(stage: str, fraction: float) -> None:
    """Ignore the progress: the default of functions that report it."""


def run(
    spec: Spec,
    gpu: Gpu,
    progress: Progress = no_progress,
    *,
    run_context: RunContext | None = None,
    cases: Sequence[Case] | None = None,
    now_ns: Callable[[], int] = time.time_ns,
    open_timer: Callable[[Gpu], SampleTimer] = Timer,
) -> BenchResult:
    """Measure ``cases`` or, if that is None, the cases of a Spec.

    A case whose values are wrong, or that a library does not support, has a result without a time. After a
    KeyboardInterrupt the result has the measurements so far; if there are none, the interrupt propagates.
    A CollectiveError or StorageError has the same effect, and its message is the ``failure`` of the result.
    ``open_timer`` opens the timer of the run.

    Raises InputError, before any allocation, for a case that does not fit in memory, Unsupported if no
    case is supported, and the errors of workloads and device.
    """
    begin_ns = now_ns()
    cases = plan_cases(spec, gpu) if cases is None else cases
    run_context = run_context or RunContext()
    check_fit(
        cases,
        gpu.memory_info().free_bytes,
        run_context.host.available_bytes,
        simulated=gpu.simulated,
    )
    machine = Machine(gpu.simulated, gpu.facts(), run_context)
    measured_cases: list[_MeasuredCase] = []
    is_complete, failure, begun_case_count = False, "", 0
    try:
        with closing(open_timer(gpu)) as timer:
            shares = share_budget(spec, cases, _budget_clock(timer))
            for index, (case, share_s) in enumerate(shares):
                progress(case.title, index / len(cases))
                begun_case_count = index + 1
                implementations, variables = case.implementations, run_context.variables
                method = plan_method(
                    case.method, share_s, len(implementations), variables, simulated=gpu.simulated
                )
                case_progress = sub_progress(progress, index, len(cases))
                outcomes = measure_case(timer, implementations, method, progress=case_progress)
                measured_cases += map(
                    _MeasuredCase, [case] * len(implementations), implementations, outcomes
                )
                if any(measured_case.was_interrupted for measured_case in measured_cases):
                    break
            else:
                is_complete = True
                measured_cases += _cases_beyond_budget(spec, cases[begun_case_count:])
    except (KeyboardInterrupt, CollectiveError, StorageError) as error:
        if all(measured_case.outcome is None for measured_case in measured_cases):
            raise
        failure = "" if isinstance(error, KeyboardInterrupt) else error.message
    results = _summarize(machine, measured_cases, is_complete=is_complete)
    warnings = tuple(result_warnings(results, _titles_by_warning(measured_cases)))
    result = BenchResult(
        gpu.simulated, spec.bench, begin_ns, is_complete, warnings, results, failure=failure
    )
    return spec.conclude(result, cases)


def _budget_clock(timer: SampleTimer) -> Callable[[], float]:
    """Return a function that returns the seconds since now, by the timer or the clock of the host.

    The larger one counts: the virtual time of a simulated device passes faster or slower than real time.
    """
    timer_begin_s, host_begin_s = timer.now_s(), time.monotonic()
    return lambda: max(timer.now_s() - timer_begin_s, time.monotonic() - host_begin_s)


def _cases_beyond_budget(spec: Spec, cases: Sequence[Case]) -> list[_MeasuredCase]:
    """Return cases that did not begin, because twice the time budget was used up."""
    reason = Unsupported(
        f"no case begins after twice the time budget of {format_seconds(spec.budget_s or 0.0)}"
    )
    return [
        _MeasuredCase(case, implementation, UnsupportedCase(implementation, reason, {}))
        for case in cases
        for implementation in case.implementations
    ]


def _summarize(
    machine: Machine, measured_cases: Sequence[_MeasuredCase], *, is_complete: bool
) -> tuple[CaseResult, ...]:
    """Return the results of all implementations. Raises Unsupported if none is supported."""
    unsupported_cases = [
        measured_case.outcome
        for measured_case in measured_cases
        if isinstance(measured_case.outcome, UnsupportedCase)
    ]
    results = tuple(
        summarize_case(
            machine, measured_case.case, measured_case.implementation, measured_case.outcome
        )
        for measured_case in measured_cases
        if measured_case.outcome is not None
    )
    if is_complete and unsupported_cases and len(unsupported_cases) == len(results):
        raise none_measured(unsupported_cases)
    return results


def none_measured(errors: Sequence[Unsupported]) -> Unsupported:
    """Return the error of a run without a measurement, with the reasons of all cases."""
    if len(errors) == 1:
        return errors[0]
    reasons = dict.fromkeys(error.message for error in errors)
    return Unsupported(f"no case can be measured: {'; '.join(reasons)}", hint=errors[0].hint)


def _titles_by_warning(measured_cases: Sequence[_MeasuredCase]) -> Mapping[str, Sequence[str]]:
    """Return the warnings of measurements, each with the titles of the measured cases."""
    titles_by_warning: dict[str, dict[str, None]] = {}
    for measured_case in measured_cases:
        if not isinstance(measured_case.outcome, UnsupportedCase):
            for warning in (
                measured_case.outcome.warnings if measured_case.outcome else (_NO_SAMPLES,)
            ):
                titles_by_warning.setdefault(warning, {})[measured_case.case.title] = None
    return {warning: tuple(case_titles) for warning, case_titles in titles_by_warning.items()}


def measure_case(
    timer: SampleTimer,
    workloads: Sequence[Workload],
    method: Method,
    *,
    progress: Progress = no_progress,
    pause: Callable[[float], None] = time.sleep,
    skip_settling: bool | None = None,
) -> tuple[Outcome, ...]:
    """Measure workloads, interleaved, in rounds with new buffers; return an outcome for each.

    If a workload is not supported, the measurement restarts with the others. ``progress`` may raise
    KeyboardInterrupt after a sample: then the measurements so far are returned or, if there are none, the
    interrupt propagates. With ``skip_settling`` no time is spent on waiting for the device to settle. That is
    the default on a simulated device, whose virtual time does not pass by itself.

    Raises UsageError for an impossible method, and the errors of workloads and device.
    """
    skip_settling = timer.gpu.simulated if skip_settling is None else skip_settling
    planned_method = without_settling(method) if skip_settling else method
    planned_method = replace(
        planned_method, interleaved=method.interleaved or _distinct_names(workloads)
    )
    measurements_by_workload: list[list[Measurement]] = [[] for _ in workloads]
    try:
        for index, round_method in enumerate(round_methods(planned_method)):
            round_progress = sub_progress(progress, index, planned_method.rounds)
            measurements_of_round = measure_round(
                timer, workloads, round_method, round_progress, pause
            )
            for finished_rounds, measurement in zip(
                measurements_by_workload, measurements_of_round, strict=True
            ):
                finished_rounds.extend([measurement] if measurement else [])
            if any(
                measurement is None or measurement.ends_case
                for measurement in measurements_of_round
            ):
                break
    except UnsupportedCase as unsupported:
        supported_workloads = [
            workload for workload in workloads if workload is not unsupported.workload
        ]
        measure_again = partial(
            measure_case, progress=progress, pause=pause, skip_settling=skip_settling
        )
        outcomes = iter(
            measure_again(timer, supported_workloads, method) if supported_workloads else ()
        )
        return tuple(
            unsupported if workload is unsupported.workload else next(outcomes)
            for workload in workloads
        )
    except KeyboardInterrupt:
        if not all(measurements_by_workload):
            raise
        for finished_rounds in measurements_by_workload:
            finished_rounds[-1] = replace(finished_rounds[-1], stop_reason="interrupted")
    return tuple(
        merge_rounds(finished_rounds, planned_method) if finished_rounds else None
        for finished_rounds in measurements_by_workload
    )


def measure_round(
    timer: SampleTimer,
    workloads: Sequence[Workload],
    method: Method,
    progress: Progress,
    pause: Callable[[float], None],
) -> tuple[Measurement | None, ...]:
    """Perform the steps of one round; return None for a workload that an interrupt left without samples."""
    with ExitStack() as cleanup:
        runs = prepare(timer, workloads, method, cleanup)
        correct_runs = [run for run in runs if not run.is_wrong]
        try:
            with garbage_collection_off():
                warm_up(correct_runs, progress)
                sample(correct_runs, progress, pause)
                measure_energy(correct_runs, progress)
        except KeyboardInterrupt:
            if not any(run.kept_readings for run in runs):
                raise
        timer.gpu.sync_stream(timer.stream)  # an interrupt may have left work in the stream
        return tuple(_finish_run(run) for run in runs)


def _finish_run(run: WorkloadRun) -> Measurement | None:
    """Verify the values that the samples computed, and summarize the run."""
    if not run.is_wrong:
        if not run.kept_readings:
            return None
        if run.is_sampling:
            end_sampling(run)
        run.stop_reason = run.stop_reason or "interrupted"
        run.verification = verify(run.timer, run.rotation, run.prepared_workload)
    return summarize_run(run)


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Keep Python's garbage collector from running during samples."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def sub_progress(progress: Progress, index: int, count: int) -> Progress:
    """Return a Progress for step ``index`` of ``count`` steps, which reports the fraction of all steps."""
    return lambda stage, fraction: progress(stage, (index + fraction) / count)


def _distinct_names(workloads: Sequence[Workload]) -> tuple[str, ...]:
    """Return a name for each interleaved workload: its library or name; if equal, the axes that differ."""
    if len(workloads) < 2:
        return ()
    workload_names = tuple(
        workload.library if isinstance(workload, Implementation) else workload.name
        for workload in workloads
    )
    if len(set(workload_names)) == len(workload_names):
        return workload_names
    first_axes, *other_axes = (workload.axes for workload in workloads)
    differing_axes = [
        name
        for name in first_axes
        if any(axes.get(name) != first_axes[name] for axes in other_axes)
    ]
    return tuple(
        " ".join(str(workload.axes.get(name)) for name in differing_axes) for workload in workloads
    )
