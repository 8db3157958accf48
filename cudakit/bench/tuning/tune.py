"""Tuning: find the fastest algorithm for each GEMM of a Spec on one device."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from cudakit.bench.case import Case, Method, Verification, check_fit
from cudakit.bench.gemm import GemmSpec, GemmWorkload, PreparedGemm
from cudakit.bench.pipeline import (
    MAX_TIMEOUTS,
    Progress,
    garbage_collection_off,
    no_progress,
    none_measured,
    rotate_buffers,
    sub_progress,
)
from cudakit.bench.sampling import BufferRotation, SteadyState, make_sample_work
from cudakit.bench.stats import autocorrelation_time, median_ci
from cudakit.bench.timer import Reading, SampleWork, Timer, disabling_variable
from cudakit.bench.tuning.search import DEFAULT_CANDIDATE, Limits, Outcome, search
from cudakit.bench.tuning.tuned import Tuned, TunedGemm, TunedMachine, UntunedGemm
from cudakit.errors import CudakitError, Unsupported, UsageError
from cudakit.gpu.api import Gpu, Stream
from cudakit.gpu.api.facts import NOT_QUERIED, RunContext
from cudakit.gpu.api.gemm import Algorithm, Blas, Gemm, GemmPlan, GemmSettings, never_over
from cudakit.units import Unavailable

# Duration of a sample: a thousand times the resolution of events, but short enough for thousands of
# candidates.
_SAMPLE_S = 2e-3
# Shares of the time limit of a GEMM at which the listing of algorithms and the warm-up end.
_LISTING_TIME_SHARE, _WARMUP_TIME_SHARE = 0.15, 0.3

_UNBLOCKED_WARNING = (
    "samples include launch gaps, because an environment variable prevents the use of the blocker"
)
_NOT_REPORTED = Unavailable("the device does not report this property")
_NO_FINAL = Unavailable("in the search, no other algorithm was faster than the default")
_INTERRUPTED = Unavailable("the search was interrupted")
_TOO_FEW_SAMPLES = Unavailable("too few samples for a confidence interval")
_NO_SAMPLE = Unavailable("no other algorithm was measured")


def tuning_machine(gpu: Gpu, run_context: RunContext) -> TunedMachine:
    """Return the device and library versions that algorithms are tuned for."""
    fields, versions = gpu.facts().fields, run_context.versions
    gpu_name, capability = (
        value if isinstance(value, Unavailable) else str(value)
        for value in (fields.get(name, _NOT_REPORTED) for name in ("name", "compute_capability"))
    )
    with closing(gpu.blas("cublaslt")) as blas:
        return TunedMachine(
            gpu=gpu_name,
            compute_capability=capability,
            library=blas.library,
            library_version=blas.version,
            driver=versions.get("driver", NOT_QUERIED),
            cudakit=versions.get("cudakit", NOT_QUERIED),
        )


def tune(
    spec: GemmSpec,
    gpu: Gpu,
    limits: Limits,
    progress: Progress = no_progress,
    *,
    earlier_tuning: Tuned | None = None,
    run_context: RunContext | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> Tuned:
    """Search for the fastest algorithm of each GEMM, unless ``earlier_tuning`` has a complete search for it.

    ``progress`` may raise KeyboardInterrupt: the result then has the searches so far. Raises UsageError for a
    library other than cublaslt, InputError if a GEMM does not fit in memory or ``earlier_tuning`` is of
    another machine, Unsupported if no GEMM can be tuned, and the errors of the device.
    """
    if spec.library != "cublaslt" or spec.baselines:
        option = "--vs" if spec.library == "cublaslt" else f"--library {spec.library}"
        raise UsageError(
            f"--tune measures only algorithms of cublaslt, so {option} has no effect",
            hint=f"remove {option}",
        )
    begin_ns = now_ns()
    run_context = run_context or RunContext()
    machine = tuning_machine(gpu, run_context)
    lacks_blocker = bool(disabling_variable(run_context.variables))
    session = _Session(spec, gpu, limits, is_unblocked=lacks_blocker)
    cases = dict(zip(spec.gemms, spec.cases(gpu), strict=True))
    check_fit(
        tuple(cases.values()),
        gpu.memory_info().free_bytes,
        run_context.host.available_bytes,
        simulated=gpu.simulated,
    )
    earlier_results = earlier_tuning.results_for(machine) if earlier_tuning else {}
    is_complete = session.tune_all(
        cases,
        {key for key, earlier in earlier_results.items() if earlier.stopped != "interrupted"},
        progress,
    )
    kept = [earlier for key, earlier in earlier_results.items() if key not in session.gemms]
    return Tuned(
        simulated=gpu.simulated,
        time_ns=begin_ns,
        complete=is_complete,
        machine=machine,
        warnings=(_UNBLOCKED_WARNING,) if lacks_blocker else (),
        gemms=(*kept, *session.gemms.values()),
        untuned=tuple(session.untuned_gemms),
    )


class _Session:
    """The searches of one command, and their results so far."""

    def __init__(self, spec: GemmSpec, gpu: Gpu, limits: Limits, *, is_unblocked: bool) -> None:
        self.gemms: dict[object, TunedGemm] = {}
        self.untuned_gemms: list[UntunedGemm] = []
        self._unsupported_errors: list[Unsupported] = []
        self._spec, self._gpu, self._limits, self._is_unblocked = spec, gpu, limits, is_unblocked

    def tune_all(
        self, cases: Mapping[Gemm, Case], skipped_keys: Collection[object], progress: Progress
    ) -> bool:
        """Tune the GEMMs that are not in ``skipped_keys``; return whether all were tuned."""
        gemms = [gemm for gemm in cases if (gemm, self._spec.settings) not in skipped_keys]
        try:
            with closing(Timer(self._gpu)) as timer:
                for index, gemm in enumerate(gemms):
                    case = cases[gemm]
                    of_all = sub_progress(progress, index, len(gemms))

                    def of_gemm(
                        stage: str, fraction: float, of_all: Progress = of_all, case: Case = case
                    ) -> None:
                        of_all(f"{case.title}: {stage}", fraction)

                    try:
                        result = self._search(timer, gemm, self._method(case.method), of_gemm)
                    except Unsupported as reason:
                        self._unsupported_errors.append(reason)
                        result = UntunedGemm(gemm, reason.message, wrong=False)
                    if isinstance(result, UntunedGemm):
                        self.untuned_gemms.append(result)
                        continue
                    self.gemms[result.key] = result
                    if result.stopped == "interrupted":
                        return False
        except KeyboardInterrupt:
            if not self.gemms:
                raise
            return False
        if self._unsupported_errors and not self.gemms and not skipped_keys:
            raise none_measured(self._unsupported_errors)
        return True

    def _search(
        self, timer: Timer, gemm: Gemm, method: Method, progress: Progress
    ) -> TunedGemm | UntunedGemm:
        spec, limits, begin_s = self._spec, self._limits, timer.now_s()

        def is_over(share: float) -> bool:
            return timer.now_s() - begin_s >= share * limits.time_s

        with closing(self._gpu.blas(spec.library)) as blas:
            listed = candidates(
                blas,
                gemm,
                spec.settings,
                seed=spec.seed,
                is_over=partial(is_over, _LISTING_TIME_SHARE),
            )
        workload = GemmWorkload(gemm, spec.settings, spec.library, spec.fill)
        trials = AlgorithmTrials(timer, workload, method, listed.algorithms, seed=spec.seed)
        with closing(trials), garbage_collection_off():
            if not trials.verify(DEFAULT_CANDIDATE):
                reason = (
                    trials.verifications[DEFAULT_CANDIDATE].detail
                    or "the error exceeds that of rounding"
                )
                return UntunedGemm(
                    gemm, f"the library's default algorithm computes wrong values: {reason}", True
                )
            trials.warm_up(partial(is_over, _WARMUP_TIME_SHARE), partial(progress, "warming up"))
            outcome = search(
                trials,
                len(listed.algorithms),
                limits,
                seed=spec.seed,
                now_s=timer.now_s,
                begin_s=begin_s,
                progress=progress,
            )
            if not outcome.is_significant:
                trials.verify(DEFAULT_CANDIDATE)
            return _tuned_gemm(spec, gemm, limits, listed, trials, outcome)

    def _method(self, method: Method) -> Method:
        """Return the measurement method of trials: shorter samples, interleaved, in one round."""
        return replace(
            method,
            rounds=1,
            # In virtual time a mean is no more precise than one execution.
            sample_s=0.0 if self._gpu.simulated else _SAMPLE_S,
            warmup_s=0.0 if self._gpu.simulated else method.warmup_s,
            blocker=method.blocker and not self._is_unblocked,
            seed=self._spec.seed,
            interleaved=("all algorithms",),
        )


def _tuned_gemm(
    spec: GemmSpec,
    gemm: Gemm,
    limits: Limits,
    listed: Candidates,
    trials: AlgorithmTrials,
    outcome: Outcome,
) -> TunedGemm:
    """Return the result of the search for one GEMM."""
    default_s = trials.times_s(DEFAULT_CANDIDATE, outcome.rounds)
    winner_s = trials.times_s(outcome.winner_index, outcome.rounds)
    no_gain = _INTERRUPTED if outcome.stop_reason == "interrupted" else _NO_FINAL
    return TunedGemm(
        gemm=gemm,
        shape=spec.shapes.get(gemm, ""),
        settings=spec.settings,
        winner=listed.algorithms[outcome.winner_index],
        default=listed.algorithms[DEFAULT_CANDIDATE],
        significant=outcome.is_significant,
        gain=no_gain if outcome.gain is None else outcome.gain,
        gain_interval=no_gain
        if outcome.gain is None
        else outcome.gain_interval or _TOO_FEW_SAMPLES,
        default_s=median(default_s) if default_s else _NO_SAMPLE,
        default_ci95_s=_interval(default_s),
        winner_s=median(winner_s) if winner_s else _NO_SAMPLE,
        winner_ci95_s=_interval(winner_s),
        verification=trials.verifications[outcome.winner_index],
        tried=outcome.tried_count,
        candidates=len(listed.algorithms),
        all_listed=listed.complete,
        wrong=tuple(listed.algorithms[number] for number in outcome.wrong_finalists),
        rounds=outcome.rounds,
        stopped=outcome.stop_reason,
        limits=limits,
        method=trials.method,
        seed=spec.seed,
    )


def _interval(times_s: tuple[float, ...]) -> tuple[float, float] | Unavailable:
    return median_ci(times_s, correlation=autocorrelation_time(times_s)) if times_s else _NO_SAMPLE


# --- Trials: interleaved measurements of the algorithms of one GEMM, on the same operands ----------

# A candidate whose time is more than this multiple of the default's is not measured: it would delay all
# rounds.
_MAX_SLOWDOWN = 3.0
_PILOT_SAMPLES = 2  # Number of samples that estimate the time of a candidate.


@dataclass
class _Candidate:
    """An algorithm that is ready to run."""

    plan: GemmPlan
    rotation: BufferRotation
    estimate_s: float
    work: SampleWork | None = None

    def drop_work(self) -> None:
        if self.work is not None:
            self.work.close()
            self.work = None

    def close(self) -> None:
        self.drop_work()
        self.plan.close()


class AlgorithmTrials:
    """Measures the algorithms of a GEMM, which have numbers; number 0 is the library's default.

    Raises Unsupported if the library cannot compute the GEMM with the default.
    """

    def __init__(
        self,
        timer: Timer,
        workload: GemmWorkload,
        method: Method,
        algorithms: Sequence[Algorithm],
        *,
        seed: int,
    ) -> None:
        self.verifications: dict[int, Verification] = {}  # The last verification of each candidate.
        self.errors: dict[int, str] = {}  # Reasons why candidates cannot run.
        self.readings_by_round: list[dict[int, Reading]] = []
        self._timer, self._workload, self._method, self._seed = timer, workload, method, seed
        self._algorithms = algorithms
        self._candidates: dict[int, _Candidate] = {}
        self._is_blocked, self._timeout_count = method.blocker and method.clock == "device", 0
        with ExitStack() as cleanup:
            self._blas = cleanup.enter_context(closing(timer.gpu.blas(workload.library)))
            self._gemm = self._allocate()
            cleanup.callback(lambda: self._gemm.close())
            self._set_count = rotate_buffers(timer, self._gemm, method)
            cleanup.callback(self._close_candidates)
            self._candidates[DEFAULT_CANDIDATE] = self._load_candidate(DEFAULT_CANDIDATE)
            self._cleanup = cleanup.pop_all()

    @property
    def method(self) -> Method:
        """The measurement method, with the blocker, buffer sets and executions that were used."""
        work = self._candidates[DEFAULT_CANDIDATE].work
        return replace(
            self._method,
            blocker=self._is_blocked,
            buffer_sets=self._set_count,
            executions=work.executions if work else 1,
        )

    def warm_up(self, is_over: Callable[[], bool], progress: Callable[[float], None]) -> None:
        """Run the default algorithm until the device has settled or ``is_over()``."""
        state = SteadyState(self._method.warmup_s, self._method.max_warmup_s)
        begin_s = self._timer.now_s()
        while not state.add(self._take_reading(DEFAULT_CANDIDATE), self._timer.now_s() - begin_s):
            if is_over():
                return
            progress(min(state.elapsed_s / state.max_s, 1.0))

    def prepare(self, candidate_number: int) -> bool:
        """Prepare a candidate; return False if it cannot run or is several times slower than the default."""
        try:
            candidate = self._load_candidate(candidate_number)
        except CudakitError as error:
            self._timer.gpu.sync()  # Raises if the device is lost.
            self.errors[candidate_number] = error.message
            return False
        if candidate.estimate_s > _MAX_SLOWDOWN * self._candidates[DEFAULT_CANDIDATE].estimate_s:
            candidate.close()
            return False
        self._candidates[candidate_number] = candidate
        return True

    def release(self, candidate_number: int) -> None:
        self._candidates.pop(candidate_number).close()

    def measure(self, ordered_numbers: Sequence[int]) -> Sequence[float]:
        """Measure each candidate once: in cycles if all clocks are known, else in seconds."""
        readings = {number: self._take_reading(number) for number in ordered_numbers}
        self.readings_by_round.append(readings)
        valid_readings = [reading for reading in readings.values() if reading.valid]
        in_cycles = all(reading.sm_clock_hz for reading in valid_readings)
        return [
            reading.time_s * ((reading.sm_clock_hz or 1.0) if in_cycles else 1.0)
            if reading.valid
            else math.nan
            for reading in readings.values()
        ]

    def verify(self, candidate_number: int) -> bool:
        """Run a candidate on every buffer set, and return whether the outputs are correct."""
        plan, stream = self._candidates[candidate_number].plan, self._timer.stream
        for index in range(self._set_count):
            self._gemm.enqueue_by(plan, stream, index)
        self._timer.gpu.sync_stream(stream)
        self.verifications[candidate_number] = self._gemm.verify()
        return self.verifications[candidate_number].passed

    def reallocate(self) -> None:
        """Continue with new buffers of the same values."""
        for candidate in self._candidates.values():
            candidate.drop_work()
        self._gemm.close()
        self._gemm = self._allocate()
        if self._set_count > 1:
            self._gemm.rotate(self._set_count)

    def times_s(self, candidate_number: int, round_count: int) -> tuple[float, ...]:
        """Return the times of a candidate in the last ``round_count`` rounds; 0 selects all rounds."""
        candidate_readings = (
            readings.get(candidate_number) for readings in self.readings_by_round[-round_count:]
        )
        return tuple(reading.time_s for reading in candidate_readings if reading and reading.valid)

    def close(self) -> None:
        self._cleanup.close()

    def _allocate(self) -> PreparedGemm:
        """Allocate the operands, which all algorithms share."""
        return PreparedGemm(self._timer.gpu, self._workload, self._seed)

    def _load_candidate(self, candidate_number: int) -> _Candidate:
        """Load the kernel of a candidate by one execution, and estimate its time."""
        workload = self._workload
        plan = self._blas.prepare(
            workload.gemm, workload.settings, self._algorithms[candidate_number]
        )

        def enqueue(stream: Stream, index: int) -> None:
            self._gemm.enqueue_by(plan, stream, index)

        try:
            rotation = BufferRotation(enqueue, self._set_count)
            pilot_work = SampleWork(rotation.run)
            self._timer.time(pilot_work)
            times_s = [self._timer.time(pilot_work).time_s for _ in range(_PILOT_SAMPLES)]
        except BaseException:
            plan.close()
            raise
        return _Candidate(plan, rotation, min(times_s))

    def _take_reading(self, candidate_number: int) -> Reading:
        candidate = self._candidates[candidate_number]
        if candidate.work is None:
            # All candidates have the number of executions of the default, so that their samples are
            # comparable.
            estimate_s = self._candidates[DEFAULT_CANDIDATE].estimate_s
            candidate.work = make_sample_work(
                self._timer, candidate.rotation, self._method, estimate_s
            )
        reading = self._timer.time(candidate.work, is_blocked=self._is_blocked)
        if not reading.valid:
            self._timeout_count += 1
            self._is_blocked = self._timeout_count < MAX_TIMEOUTS
        return reading

    def _close_candidates(self) -> None:
        for candidate in self._candidates.values():
            candidate.close()
        self._candidates.clear()


# --- Candidates of a search: the algorithms that the library recommends, then all others that it offers ---

# Number of algorithms to request from the library's heuristics, which rank only the first ones reliably.
_RECOMMENDED_COUNT = 32


@dataclass(frozen=True, slots=True)
class Candidates:
    """Algorithms in the order of trials; the first is the library's default."""

    algorithms: tuple[Algorithm, ...]
    complete: bool  # Whether all algorithms of the library are listed.


def candidates(
    blas: Blas,
    gemm: Gemm,
    settings: GemmSettings,
    *,
    seed: int,
    is_over: Callable[[], bool] = never_over,
) -> Candidates:
    """Return the recommended algorithms in order, then the others in random order, without duplicates.

    Listing can take seconds, and ends early when ``is_over()`` is true. Raises Unsupported if the library has
    no algorithm.
    """
    recommended_algorithms = blas.heuristics(gemm, settings, _RECOMMENDED_COUNT)
    if not recommended_algorithms:
        raise Unsupported(
            f"{blas.library} has no algorithm for this GEMM in {gemm.dtype}",
            hint="try another --layout, --padding or --workspace",
        )
    recommended_by_parameters = _distinct_by_parameters(recommended_algorithms)
    offered_algorithms = _distinct_by_parameters(blas.algorithms(gemm, settings, is_over))
    other_algorithms = [
        algorithm
        for parameters, algorithm in offered_algorithms.items()
        if parameters not in recommended_by_parameters
    ]
    random.Random(seed).shuffle(other_algorithms)  # noqa: S311 not for cryptography
    return Candidates((*recommended_by_parameters.values(), *other_algorithms), not is_over())


def _distinct_by_parameters(algorithms: Iterable[Algorithm]) -> dict[Algorithm, Algorithm]:
    """Return the first algorithm with each combination of parameters, as a dict by combination."""
    distinct_algorithms: dict[Algorithm, Algorithm] = {}
    for algorithm in algorithms:
        # The workspace is not compared, because it follows from the other parameters.
        distinct_algorithms.setdefault(replace(algorithm, workspace_bytes=0), algorithm)
    return distinct_algorithms
