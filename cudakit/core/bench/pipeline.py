"""The pipeline of a bench: plan > prepare > warm_up > sample > verify > summarize, a module each.

``run`` measures all cases of a Spec; ``measure_case`` measures one case and its baselines; ``measure_rounds``
repeats ``measure_round``, which performs the steps of one round, and merges the rounds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from cudakit.core.bench.case import Case, Implementation, check_fit
from cudakit.core.bench.energy import count_energy
from cudakit.core.bench.measurement import Measurement, merge_rounds
from cudakit.core.bench.method import Method
from cudakit.core.bench.plan import plan_cases, plan_method, round_methods, without_settling
from cudakit.core.bench.prepare import Progress, WorkloadRun, prepare
from cudakit.core.bench.result import BenchResult, CaseResult
from cudakit.core.bench.sample import end_sampling, sample
from cudakit.core.bench.spec import Spec
from cudakit.core.bench.summarize import Machine, summarize_case, summarize_run
from cudakit.core.bench.timer import Timer
from cudakit.core.bench.verify import verify
from cudakit.core.bench.warm_up import warm_up
from cudakit.core.bench.warnings import result_warnings
from cudakit.core.bench.workload import Refused, Workload
from cudakit.core.bench.workloads.graph_costs import graph_costs
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.run_context import RunContext

_NOTHING_KEPT = "no sample could be kept: there is no figure"

# None if no sample could be kept.
Outcome: TypeAlias = Measurement | Refused | None


class _Measured(NamedTuple):
    case: Case
    implementation: Implementation
    outcome: Outcome


def no_progress(stage: str, fraction: float) -> None:
    """Report nothing."""


def run(
    spec: Spec,
    gpu: Gpu,
    progress: Progress = no_progress,
    *,
    run_context: RunContext | None = None,
    cases: Sequence[Case] | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> BenchResult:
    """Measure the cases of a Spec, or ``cases`` instead.

    An implementation that computed wrong values, or that a library does not offer, has a result without
    times. After a KeyboardInterrupt the result has the measurements so far; without any, the interrupt
    propagates. Raises InputError for a case that does not fit in memory, before anything is allocated,
    Unsupported if nothing can be measured, and the errors of workloads and device.
    """
    begin_ns = now_ns()
    cases = plan_cases(spec, gpu) if cases is None else cases
    run_context = run_context or RunContext()
    check_fit(cases, gpu.memory_info().free_bytes, run_context.host.available_bytes)
    machine = Machine(gpu.simulated, gpu.facts(), run_context)
    measured, complete = _measure_cases(gpu, spec, cases, run_context, progress)
    results = _summarize(machine, measured, complete=complete)
    return BenchResult(
        simulated=gpu.simulated,
        bench=spec.bench,
        time_ns=begin_ns,
        complete=complete,
        warnings=tuple(result_warnings(results, _deviations(measured))),
        results=results,
        graphs=graph_costs(results),
    )


def _measure_cases(
    gpu: Gpu, spec: Spec, cases: Sequence[Case], run_context: RunContext, progress: Progress
) -> tuple[list[_Measured], bool]:
    """Measure the cases, each in its share of the remaining time; return also whether all were measured."""
    measured: list[_Measured] = []
    try:
        with closing(Timer(gpu)) as timer:
            begin_s = timer.now_s()
            for at, case in enumerate(cases):
                elapsed_s, share_s = timer.now_s() - begin_s, None
                if spec.budget_s is not None:
                    share_s = (spec.budget_s - elapsed_s) / (len(cases) - at)
                count = len(case.implementations)
                method = plan_method(case.method, share_s, count, run_context.variables)
                part = part_of(progress, at, len(cases))
                found = measure_case(timer, case, method, seed=spec.seed, progress=part)
                measured += [_Measured(case, *one) for one in found.items()]
                if any(isinstance(one, Measurement) and one.interrupted for one in found.values()):
                    return measured, False
    except KeyboardInterrupt:
        if all(one.outcome is None for one in measured):
            raise
        return measured, False
    return measured, True


def _summarize(
    machine: Machine, measured: Sequence[_Measured], *, complete: bool
) -> tuple[CaseResult, ...]:
    """Return the results of all implementations. Raises Refused if every one was refused."""
    refusals = [one.outcome for one in measured if isinstance(one.outcome, Refused)]
    results = tuple(
        summarize_case(machine, one.case, one.implementation, one.outcome)
        for one in measured
        if one.outcome is not None
    )
    if complete and refusals and len(refusals) == len(results):
        raise refusals[0]
    return results


def _deviations(measured: Sequence[_Measured]) -> Mapping[str, Sequence[str]]:
    """Collect the deviations from the method, each with the titles of its cases."""
    titles: dict[str, list[str]] = {}
    for one in measured:
        if not isinstance(one.outcome, Refused):
            for deviation in one.outcome.warnings if one.outcome else (_NOTHING_KEPT,):
                titles.setdefault(deviation, []).append(one.case.title)
    return titles


def measure_case(
    timer: Timer, case: Case, method: Method, *, seed: int, progress: Progress
) -> Mapping[Implementation, Outcome]:
    """Measure the implementations of a case, interleaved; None for one without a kept sample.

    If ``prepare`` refuses an implementation, the measurement restarts with the others.
    """
    found: dict[Implementation, Outcome] = dict.fromkeys(case.implementations)
    while able := [one for one, refused in found.items() if refused is None]:
        interleaved = replace(method, interleaved=_distinct_names(able))
        try:
            measured = measure_rounds(timer, able, interleaved, seed=seed, progress=progress)
        except Refused as refusal:
            found.update((one, refusal) for one in able if one is refusal.workload)
            continue
        by_name = {one.name: one for one in measured}
        return found | {one: by_name.get(one.name) for one in able}
    return found


def measure_rounds(
    timer: Timer,
    workloads: Sequence[Workload],
    method: Method,
    *,
    seed: int = 0,
    progress: Progress = no_progress,
    pause: Callable[[float], None] = time.sleep,
    hurry: bool | None = None,
) -> tuple[Measurement, ...]:
    """Measure workloads by one method, in rounds with newly allocated buffers.

    Samples of several workloads are interleaved, so that all run at the same clock. ``progress`` may raise
    KeyboardInterrupt after a sample: the measurements so far are returned; without any, the interrupt
    propagates. ``hurry`` skips the wait for a device to settle; it is the default on a simulated device,
    where time does not pass by itself.

    Raises UsageError for an impossible method, Refused for a workload that device or library does not offer,
    and the errors of workloads and device.
    """
    if timer.gpu.simulated if hurry is None else hurry:
        method = without_settling(method)
    names = tuple(workload.name for workload in workloads) if len(workloads) > 1 else ()
    method = replace(method, seed=seed, interleaved=method.interleaved or names)
    rounds: list[list[Measurement]] = [[] for _ in workloads]
    try:
        for number, part in enumerate(round_methods(method)):
            share = part_of(progress, number, method.rounds)
            measured = measure_round(timer, workloads, part, share, pause)
            for found, one in zip(rounds, measured, strict=True):
                found.extend([one] if one else [])
            if any(one is None or one.ends_case for one in measured):
                break
    except KeyboardInterrupt:
        if not all(rounds):
            raise
        for found in rounds:
            found[-1] = replace(found[-1], stopped="interrupted")
    return tuple(merge_rounds(found, method) for found in rounds if found)


def measure_round(
    timer: Timer,
    workloads: Sequence[Workload],
    method: Method,
    progress: Progress,
    pause: Callable[[float], None],
) -> tuple[Measurement | None, ...]:
    """Perform the steps of one round; None for a workload that an interrupt left without samples."""
    with ExitStack() as owned:
        runs = prepare(timer, workloads, method, owned)
        correct = [run for run in runs if not run.is_wrong]
        try:
            with garbage_collection_off():
                warm_up(correct, progress)
                sample(correct, progress, pause)
                count_energy(correct, progress)
        except KeyboardInterrupt:
            if not any(run.kept for run in runs):
                raise
        timer.gpu.sync_stream(timer.stream)  # an interrupt leaves work behind
        return tuple(_finish(run) for run in runs)


def _finish(run: WorkloadRun) -> Measurement | None:
    """Verify what the samples computed, and summarize the run."""
    if not run.is_wrong:
        if not run.kept:
            return None
        if run.is_sampling:
            end_sampling(run)
        run.stopped = run.stopped or "interrupted"
        run.verification = verify(run.timer, run.rotation, run.prepared)
    return summarize_run(run)


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Keep Python's garbage collector from running during a sample."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def part_of(progress: Progress, at: int, count: int) -> Progress:
    """Report the progress of part ``at`` of ``count`` as progress of the whole."""
    return lambda stage, fraction: progress(stage, (at + fraction) / count)


def _distinct_names(implementations: Sequence[Implementation]) -> tuple[str, ...]:
    """Name interleaved implementations by library or, if that is the same, by the axes that differ."""
    if len(implementations) < 2:
        return ()
    libraries = tuple(one.library for one in implementations)
    if len(set(libraries)) == len(libraries):
        return libraries
    first, *others = (one.axes for one in implementations)
    differing = [name for name in first if any(axes.get(name) != first[name] for axes in others)]
    return tuple(" ".join(str(one.axes.get(name)) for name in differing) for one in implementations)
