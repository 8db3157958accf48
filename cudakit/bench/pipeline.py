"""The pipeline of a bench: how the samples of a Spec are taken, from top to bottom.

``run`` measures the cases of a Spec, ``measure_case`` one case with its baselines, in rounds. A round
allocates and verifies buffers, warms up, takes samples, measures energy, and verifies again; its data is in
one ``_Run`` per implementation. ``sampling`` decides what a sample executes and which readings count,
``timer`` takes a reading, and ``summary`` makes the result from the samples of all rounds.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from statistics import median
from typing import TypeAlias

from cudakit.bench.case import (
    Case,
    Implementation,
    Method,
    PreparedWorkload,
    UnsupportedCase,
    Workload,
    WorkloadWithUntimedWork,
    check_fit,
)
from cudakit.bench.energy import energy_per_execution
from cudakit.bench.labels import Axis, axes_label
from cudakit.bench.result import BenchResult
from cudakit.bench.sampling import (
    BufferRotation,
    SteadyState,
    Stopping,
    ThrottlingFilter,
    make_sample_work,
)
from cudakit.bench.spec import Spec
from cudakit.bench.stats import Samples
from cudakit.bench.summary import Measurement, merge_rounds, result_warnings, summarize_case
from cudakit.bench.timer import (
    Reading,
    SampleTimer,
    SampleWork,
    Timer,
    buffer_sets,
    disabling_variable,
    is_cold,
)
from cudakit.errors import CollectiveError, StorageError, Unsupported
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import RunContext
from cudakit.units import Unavailable, format_seconds

# A callback that receives the current stage and the fraction that is done; it may raise KeyboardInterrupt.
Progress: TypeAlias = Callable[[str, float], None]

# The result of measuring one implementation; None if all its samples were discarded.
Outcome: TypeAlias = Measurement | UnsupportedCase | None


def no_progress(stage: str, fraction: float) -> None:
    """Ignore the progress: the default of functions that report it."""


def sub_progress(progress: Progress, index: int, count: int) -> Progress:
    """Return a Progress for step ``index`` of ``count`` steps, which reports the fraction of all steps."""
    return lambda stage, fraction: progress(stage, (index + fraction) / count)


# --- all cases of a Spec ------------------------------------------------------------------------------


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
    cases = spec.cases(gpu) if cases is None else cases
    run_context = run_context or RunContext()
    simulated, facts = gpu.simulated, gpu.facts()
    free_bytes, host_bytes = gpu.memory_info().free_bytes, run_context.host.available_bytes
    check_fit(cases, free_bytes, host_bytes, simulated=simulated)
    measured: list[tuple[Case, Implementation, Outcome]] = []
    is_complete, failure, begun_count = False, "", 0
    try:
        with closing(open_timer(gpu)) as timer:
            for case, share_s in share_budget(spec, cases, _budget_clock(timer)):
                progress(case.title, begun_count / len(cases))
                implementations = case.implementations
                method = plan_method(
                    case.method,
                    share_s,
                    len(implementations),
                    run_context.variables,
                    simulated=simulated,
                )
                case_progress = sub_progress(progress, begun_count, len(cases))
                begun_count += 1
                outcomes = measure_case(timer, implementations, method, progress=case_progress)
                measured += zip([case] * len(outcomes), implementations, outcomes, strict=True)
                if any(isinstance(it, Measurement) and it.was_interrupted for it in outcomes):
                    break
            else:
                is_complete = True
        if is_complete and begun_count < len(cases):
            reason = Unsupported(
                f"no case begins after twice the time budget of {format_seconds(spec.budget_s or 0)}"
            )
            measured += (
                (case, implementation, UnsupportedCase(implementation, reason, {}))
                for case in cases[begun_count:]
                for implementation in case.implementations
            )
    except (KeyboardInterrupt, CollectiveError, StorageError) as error:
        if all(outcome is None for _, _, outcome in measured):
            raise
        failure = "" if isinstance(error, KeyboardInterrupt) else error.message
    results = tuple(
        summarize_case(case, implementation, outcome, facts, run_context, simulated=simulated)
        for case, implementation, outcome in measured
        if outcome is not None
    )
    unsupported = [outcome for _, _, outcome in measured if isinstance(outcome, UnsupportedCase)]
    if is_complete and unsupported and len(unsupported) == len(results):
        raise none_measured(unsupported)
    titles_by_warning: dict[str, dict[str, None]] = {}
    for case, _, outcome in measured:
        if not isinstance(outcome, UnsupportedCase):
            no_samples = ("all samples were discarded, so there is no time",)
            for warning in outcome.warnings if outcome else no_samples:
                titles_by_warning.setdefault(warning, {})[case.title] = None
    warnings = tuple(result_warnings(results, titles_by_warning))
    result = BenchResult(
        simulated, spec.bench, begin_ns, is_complete, warnings, results, failure=failure
    )
    return spec.conclude(result, cases)


def _budget_clock(timer: SampleTimer) -> Callable[[], float]:
    """Return a function that returns the seconds since now, by the timer or the clock of the host.

    The larger one counts: the virtual time of a simulated device passes faster or slower than real time.
    """
    timer_begin_s, host_begin_s = timer.now_s(), time.monotonic()
    return lambda: max(timer.now_s() - timer_begin_s, time.monotonic() - host_begin_s)


def none_measured(errors: Sequence[Unsupported]) -> Unsupported:
    """Return the error of a run without a measurement, with the reasons of all cases."""
    if len(errors) == 1:
        return errors[0]
    reasons = dict.fromkeys(error.message for error in errors)
    return Unsupported(f"no case can be measured: {'; '.join(reasons)}", hint=errors[0].hint)


# --- the plan: the time of a case and of its rounds ---------------------------------------------------

# Maximum share of the time of a case for the warm-up of all implementations.
_WARMUP_SHARE = 0.25
# Minimum duration of a round. Shorter rounds would mostly allocate and verify buffers.
_MIN_ROUND_S = 1.0
# Energy is measured only if that takes at most this share of the time of a case.
_ENERGY_SHARE = 0.2
# Duration of the warm-up of later rounds, relative to the first round: a device that was just busy settles
# sooner.
_LATER_WARMUP_SHARE = 0.2
# Time as a multiple of the budget after which no further case begins. Preparation and minimum numbers of
# samples can take longer than the share of a case.
_MAX_BUDGETS = 2.0
# Approximate duration of a sample on a simulated device. In virtual time longer samples are no more precise.
_SIMULATED_SAMPLE_S = 10e-6


def share_budget(
    spec: Spec, cases: Sequence[Case], now_s: Callable[[], float]
) -> Iterator[tuple[Case, float | None]]:
    """Yield each case with its equal share of the remaining time budget, or None without a budget.

    Cases after the first one are not yielded once _MAX_BUDGETS times the budget has passed.
    """
    begin_s = now_s()
    for index, case in enumerate(cases):
        if spec.budget_s is None:
            yield case, None
            continue
        elapsed_s = now_s() - begin_s
        if index and elapsed_s > _MAX_BUDGETS * spec.budget_s:
            return
        yield case, (spec.budget_s - elapsed_s) / (len(cases) - index)


def plan_method(
    method: Method,
    share_s: float | None,
    implementation_count: int,
    variables: Mapping[str, str],
    *,
    simulated: bool = False,
) -> Method:
    """Return the measurement method of a case within its share of the time budget.

    All implementations take ``share_s`` together, but have ``min_samples``. The blocking kernel is not used
    if environment ``variables`` would make it time out.
    """
    if simulated:
        method = replace(method, sample_s=min(method.sample_s, _SIMULATED_SAMPLE_S))
    if disabling_variable(variables):
        method = replace(method, blocker=False)
    if share_s is None:
        return method
    share_s = max(share_s, 1e-3)
    rounds = max(1, min(method.rounds, int(share_s / _MIN_ROUND_S)))
    warmup_count = implementation_count * (1 + _LATER_WARMUP_SHARE * (rounds - 1))
    longest_warmup_s = _WARMUP_SHARE * share_s / warmup_count
    timeout_s = min(method.rule.timeout_s, (1 - _WARMUP_SHARE) * share_s)
    min_time_s = min(method.rule.min_time_s, timeout_s / 2)
    has_energy = implementation_count * method.energy_s <= _ENERGY_SHARE * share_s
    return replace(
        method,
        warmup_s=min(method.warmup_s, longest_warmup_s),
        warmup_most_s=min(method.max_warmup_s, longest_warmup_s),
        rule=replace(method.rule, timeout_s=timeout_s, min_time_s=min_time_s),
        rounds=rounds,
        energy_s=method.energy_s if has_energy else 0.0,
    )


def round_methods(method: Method) -> Iterator[Method]:
    """Yield the measurement method of each round, with the share of samples and time of this round.

    Each round has its own buffers. Their addresses determine which memory channels and pages they share, so
    the time of a kernel differs more between rounds than within a round.
    """
    count, rule = method.rounds, method.rule
    round_rule = replace(
        rule,
        min_samples=math.ceil(rule.min_samples / count),
        min_time_s=rule.min_time_s / count,
        timeout_s=rule.timeout_s / count,
        # The CI of all rounds is narrower than the CI of one round by the square root of the number of
        # rounds.
        precision=rule.precision * count**0.5,
    )
    for index in range(count):
        warmup_share = _LATER_WARMUP_SHARE if index else 1.0
        yield replace(
            method,
            warmup_s=warmup_share * method.warmup_s,
            warmup_most_s=warmup_share * method.max_warmup_s,
            energy_s=method.energy_s if index == count - 1 else 0.0,
            rule=round_rule,
        )


# --- one case -----------------------------------------------------------------------------------------


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
    interrupt propagates. With ``skip_settling`` no time is spent on waiting for the device to settle, and
    there is one round. That is the default on a simulated device, whose virtual time does not pass by itself.

    Raises UsageError for an impossible method, and the errors of workloads and device.
    """
    skip_settling = timer.gpu.simulated if skip_settling is None else skip_settling
    planned = replace(method, interleaved=method.interleaved or _distinct_names(workloads))
    if skip_settling:
        rule = replace(method.rule, min_time_s=0.0)
        planned = replace(planned, warmup_s=0.0, energy_s=0.0, rounds=1, rule=rule)
    finished: list[list[Measurement]] = [[] for _ in workloads]
    try:
        for index, round_method in enumerate(round_methods(planned)):
            round_progress = sub_progress(progress, index, planned.rounds)
            measured = _measure_round(timer, workloads, round_method, round_progress, pause)
            for rounds, measurement in zip(finished, measured, strict=True):
                rounds += [measurement] if measurement else []
            if any(it is None or it.stop_reason in ("interrupted", "wrong") for it in measured):
                break
    except UnsupportedCase as unsupported:
        supported = [it for it in workloads if it is not unsupported.workload]
        outcomes = iter(
            measure_case(
                timer,
                supported,
                method,
                progress=progress,
                pause=pause,
                skip_settling=skip_settling,
            )
            if supported
            else ()
        )
        return tuple(
            unsupported if it is unsupported.workload else next(outcomes) for it in workloads
        )
    except KeyboardInterrupt:
        if not all(finished):
            raise
        for rounds in finished:
            rounds[-1] = replace(rounds[-1], stop_reason="interrupted")
    return tuple(merge_rounds(rounds, planned) if rounds else None for rounds in finished)


def _distinct_names(workloads: Sequence[Workload]) -> tuple[str, ...]:
    """Return a name for each interleaved workload: its library or name; if equal, the axes that differ."""
    if len(workloads) < 2:
        return ()
    names = tuple(it.library if isinstance(it, Implementation) else it.name for it in workloads)
    if len(set(names)) == len(names):
        return names
    first_axes = workloads[0].axes
    differing = [
        name
        for name in first_axes
        if any(it.axes.get(name) != first_axes[name] for it in workloads)
    ]
    return tuple(" ".join(str(it.axes.get(name)) for name in differing) for it in workloads)


# --- one round ----------------------------------------------------------------------------------------

# After this number of timeouts the blocking kernel is no longer used, because a call of the workload must
# be waiting for the device.
MAX_TIMEOUTS = 2
_PILOT_SAMPLES = 3  # Number of samples that estimate the time of one execution.
# Pauses after throttled readings, in which the device cools down.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0


def _measure_round(
    timer: SampleTimer,
    workloads: Sequence[Workload],
    method: Method,
    progress: Progress,
    pause: Callable[[float], None],
) -> tuple[Measurement | None, ...]:
    """Perform the steps of one round; return None for a workload that an interrupt left without samples."""
    with ExitStack() as cleanup:
        # Every workload allocates its first buffer set before any workload uses the remaining memory for
        # more sets.
        prepared = [
            cleanup.enter_context(closing(_prepare(timer.gpu, workload, method.seed)))
            for workload in workloads
        ]
        runs = [
            cleanup.enter_context(closing(_Run(timer, *pair, method)))
            for pair in zip(workloads, prepared, strict=True)
        ]
        correct_runs = [run for run in runs if run.verification.passed]
        try:
            with garbage_collection_off():
                for run in correct_runs:
                    run.warm_up(progress)
                _sample(correct_runs, progress, pause)
                for run in correct_runs:
                    run.measure_energy(progress)
        except KeyboardInterrupt:
            if not any(run.readings.kept_readings for run in runs):
                raise
        timer.gpu.sync_stream(timer.stream)  # an interrupt may have left work in the stream
        return tuple(run.finish() for run in runs)


def _prepare(gpu: Gpu, workload: Workload, seed: int) -> PreparedWorkload:
    try:
        return workload.prepare(gpu, seed)
    except Unsupported as reason:
        raise UnsupportedCase(workload, reason, {}) from reason


def rotate_buffers(timer: SampleTimer, prepared: PreparedWorkload, method: Method) -> int:
    """Allocate the buffer sets that the L2 state needs, and return their number."""
    set_count = buffer_sets(
        method.cache,
        l2_bytes=timer.l2_bytes,
        footprint_bytes=prepared.footprint_bytes,
        free_bytes=timer.gpu.memory_info().free_bytes,
    )
    if set_count > 1:
        prepared.rotate(set_count)
    return set_count


def _sample(runs: Sequence[_Run], progress: Progress, pause: Callable[[float], None]) -> None:
    """Take samples of the runs in turn, so that all run at the same clock, until all have enough."""
    for run in runs:
        run.begin_sampling()
    while not all(run.stop_reason for run in runs):
        for run in runs:
            if pause_s := run.take_sample():
                pause(pause_s)
        unfinished = [run for run in runs if not run.stop_reason] or runs
        progress(unfinished[0].title, min(run.fraction for run in unfinished))
    for run in runs:
        run.end_sampling()


class _Run:
    """One workload in one round: its buffers, the work of a sample, and the readings."""

    def __init__(
        self, timer: SampleTimer, workload: Workload, prepared: PreparedWorkload, method: Method
    ) -> None:
        self.title = axes_label(workload.name, workload.axes)
        self.readings = ThrottlingFilter()
        self.stop_reason = ""
        self._timer, self._workload, self._prepared = timer, workload, prepared
        self._method = method
        self._settings: dict[str, Axis] = dict(getattr(prepared, "settings", {}))
        self._rotation = BufferRotation(prepared.enqueue, rotate_buffers(timer, prepared, method))
        self._work = SampleWork(self._rotation.run)
        self._is_blocked = method.blocker and method.clock == "device"
        self._timeout_count = 0
        self._warm_up = SteadyState(method.warmup_s, method.max_warmup_s)
        self._stopping = Stopping(method.rule)
        self._pause_s = _FIRST_PAUSE_S
        self._begin_s, self._elapsed_s = timer.now_s(), 0.0
        self._is_sampling = False
        self._telemetry_before = self._telemetry_after = timer.gpu.telemetry()
        self._energy_j: float | Unavailable = Unavailable("energy was not measured")
        self._verify()

    def _verify(self) -> None:
        """Execute the workload on each buffer set that was not used since the last call; check all outputs.

        This happens before the first sample and after the last one, so that the outputs of the samples are
        checked too.
        """
        self._rotation.complete(self._timer.stream)
        self._timer.gpu.sync_stream(self._timer.stream)
        self.verification = self._prepared.verify()

    def _read(self) -> Reading:
        reading = self._timer.time(self._work, is_blocked=self._is_blocked)
        self._timeout_count += not reading.valid
        self._is_blocked = self._is_blocked and self._timeout_count < MAX_TIMEOUTS
        return reading

    def warm_up(self, progress: Progress) -> None:
        """Create the work of a sample, and take readings until the device has settled.

        Raises UnsupportedCase for a workload that cannot run in its mode.
        """
        timer, prepared, state = self._timer, self._prepared, self._warm_up
        untimed = prepared if isinstance(prepared, WorkloadWithUntimedWork) else None
        try:
            pilot = SampleWork(self._rotation.run, with_untimed_work=untimed)
            estimate_s = min(timer.time(pilot).time_s for _ in range(_PILOT_SAMPLES))
            work = make_sample_work(timer, self._rotation, self._method, estimate_s)
        except Unsupported as reason:
            raise UnsupportedCase(self._workload, reason, self._settings) from reason
        self._work = replace(work, with_untimed_work=untimed)
        begin_s = timer.now_s()
        while not state.add(self._read(), timer.now_s() - begin_s):
            progress(f"{self.title}: warming up", state.elapsed_s / state.max_s)

    def begin_sampling(self) -> None:
        self.readings = ThrottlingFilter(self._warm_up.readings)
        self._is_sampling = True
        self._telemetry_before = self._timer.gpu.telemetry()
        self._begin_s = self._timer.now_s()

    def take_sample(self) -> float:
        """Take a sample, and return the seconds to pause: the device cools down after a throttled reading.

        A run with enough samples continues until all runs have enough.
        """
        reading = self._read()
        self._elapsed_s = self._timer.now_s() - self._begin_s
        if self.readings.add(reading):
            self._pause_s = _FIRST_PAUSE_S
            time_s = reading.time_s * self._work.executions
            if not self.stop_reason and self._stopping.add(time_s, self._elapsed_s):
                self.stop_reason = self._stopping.reason
            return 0.0
        if self._elapsed_s >= self._method.rule.timeout_s:
            self.stop_reason = self.stop_reason or "timeout"
            return 0.0
        if not reading.valid:
            return 0.0
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _MAX_PAUSE_S)
        return pause_s

    @property
    def fraction(self) -> float:
        """Estimate of the share of sampling that is done, for the progress display."""
        rule = self._method.rule
        sample_share = len(self.readings.kept_readings) / max(rule.min_samples, 1)
        time_share = self._elapsed_s / max(rule.timeout_s, 1e-9)
        return min(1.0, max(0.9 * min(sample_share, 1.0), time_share))

    def end_sampling(self) -> None:
        self._is_sampling = False
        self._telemetry_after = self._timer.gpu.telemetry()

    def measure_energy(self, progress: Progress) -> None:
        """Measure the energy of one execution if there are samples, and the method asks for it."""
        kept = self.readings.kept_readings
        if not (self._method.energy_s and kept):
            return
        try:
            self._energy_j = energy_per_execution(
                self._timer.gpu,
                self._timer.stream,
                self._work.enqueue,
                executions=self._work.executions,
                execution_s=median(reading.time_s for reading in kept),
                min_s=self._method.energy_s,
                now_s=self._timer.now_s,
                progress=lambda share: progress(f"{self.title}: measuring energy", share),
            )
        except BaseException:
            self.stop_reason = "interrupted"
            raise

    def finish(self) -> Measurement | None:
        """Verify the values that the samples computed, and return the measurement of the round."""
        kept, discarded_count = self.readings.kept_readings, len(self.readings.discarded_readings)
        if self.verification.passed:
            if not kept:
                return None
            if self._is_sampling:
                self.end_sampling()
            self._verify()
        samples = Samples((), discarded=discarded_count, converged=False)
        if self.verification.passed:
            clocks = tuple(it.sm_clock_hz for it in kept if it.sm_clock_hz is not None)
            samples = Samples(
                times_s=tuple(reading.time_s for reading in kept),
                sm_clock_hz=clocks if len(clocks) == len(kept) else (),
                discarded=discarded_count,
                converged=self._stopping.converged,
            )
        reason = self.stop_reason or "interrupted"
        return Measurement(
            axes=dict(self._workload.axes),
            settings=self._settings,
            method=replace(
                self._method,
                warmup_s=self._warm_up.elapsed_s,
                blocker=self._is_blocked,
                executions=self._work.executions,
                buffer_sets=self._rotation.set_count,
            ),
            samples=samples,
            verification=self.verification,
            stop_reason=reason if self.verification.passed else "wrong",
            telemetry_before=self._telemetry_before,
            telemetry_after=self._telemetry_after,
            bytes_moved=self._prepared.bytes_moved,
            operations=self._prepared.operations,
            energy_j=self._energy_j,
            warnings=tuple(self._warnings()),
        )

    def _warnings(self) -> Iterator[str]:
        """Yield a warning for each way in which the run differed from its measurement method."""
        if self._timeout_count and not self._is_blocked:
            yield (
                "samples include launch gaps, because a call waited for the device and the blocker "
                "timed out"
            )
        if self.readings.accepts_all_clocks:
            yield "samples include a throttled clock, because the clock stayed low"
        footprint_bytes, sets = self._prepared.footprint_bytes, self._rotation.set_count
        if (
            self._method.cache == "rotate"
            and footprint_bytes
            and not is_cold(sets, l2_bytes=self._timer.l2_bytes, footprint_bytes=footprint_bytes)
        ):
            yield "L2 is not cold: the buffer sets are too small to overwrite the cache"
        if not self._warm_up.is_settled:
            yield "clock and times were not stable at the end of the warm-up"

    def close(self) -> None:
        """Release the work of the samples. The buffers stay until the caller closes the prepared workload."""
        self._work.close()


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
