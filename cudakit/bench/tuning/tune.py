"""Tuning: find the fastest algorithm for each GEMM of a Spec on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from statistics import median

from cudakit.bench.case import Case, Method, check_fit
from cudakit.bench.gemm import GemmSpec, GemmWorkload
from cudakit.bench.pipeline import (
    Progress,
    garbage_collection_off,
    no_progress,
    none_measured,
    sub_progress,
)
from cudakit.bench.stats import autocorrelation_time, median_ci
from cudakit.bench.timer import Timer, disabling_variable
from cudakit.bench.tuning.candidates import Candidates, candidates
from cudakit.bench.tuning.search import DEFAULT_CANDIDATE, Limits, Outcome, search
from cudakit.bench.tuning.trials import AlgorithmTrials
from cudakit.bench.tuning.tuned import Tuned, TunedGemm, TunedMachine, UntunedGemm
from cudakit.errors import Unsupported, UsageError
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import NOT_QUERIED, RunContext
from cudakit.gpu.api.gemm import Gemm
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
    case_by_gemm = dict(zip(spec.gemms, spec.cases(gpu), strict=True))
    check_fit(
        tuple(case_by_gemm.values()),
        gpu.memory_info().free_bytes,
        run_context.host.available_bytes,
        simulated=gpu.simulated,
    )
    earlier_results = earlier_tuning.results_for(machine) if earlier_tuning else {}
    is_complete = session.tune_all(
        case_by_gemm,
        {
            key: tuned_gemm
            for key, tuned_gemm in earlier_results.items()
            if _is_complete(tuned_gemm)
        },
        progress,
    )
    results_to_keep = {
        key: tuned_gemm for key, tuned_gemm in earlier_results.items() if key not in session.gemms
    }
    return Tuned(
        simulated=gpu.simulated,
        time_ns=begin_ns,
        complete=is_complete,
        machine=machine,
        warnings=(_UNBLOCKED_WARNING,) if lacks_blocker else (),
        gemms=(*results_to_keep.values(), *session.gemms.values()),
        untuned=tuple(session.untuned_gemms),
    )


def _is_complete(tuned_gemm: TunedGemm) -> bool:
    return tuned_gemm.stopped != "interrupted"


class _Session:
    """The searches of one command, and their results so far."""

    def __init__(self, spec: GemmSpec, gpu: Gpu, limits: Limits, *, is_unblocked: bool) -> None:
        self.gemms: dict[object, TunedGemm] = {}
        self.untuned_gemms: list[UntunedGemm] = []
        self._unsupported_errors: list[Unsupported] = []
        self._spec, self._gpu, self._search_limits, self._is_unblocked = (
            spec,
            gpu,
            limits,
            is_unblocked,
        )

    def tune_all(
        self, case_by_gemm: Mapping[Gemm, Case], skipped_keys: Iterable[object], progress: Progress
    ) -> bool:
        """Tune the GEMMs that are not in ``skipped_keys``; return whether all were tuned."""
        gemms = [gemm for gemm in case_by_gemm if (gemm, self._spec.settings) not in skipped_keys]
        try:
            with closing(Timer(self._gpu)) as timer:
                for index, gemm in enumerate(gemms):
                    gemm_progress = sub_progress(progress, index, len(gemms))
                    gemm_progress_with_title = _prefix_stages(
                        gemm_progress, case_by_gemm[gemm].title
                    )
                    if self._tune_gemm(
                        timer,
                        gemm,
                        self._method(case_by_gemm[gemm].method),
                        gemm_progress_with_title,
                    ):
                        return False
        except KeyboardInterrupt:
            if not self.gemms:
                raise
            return False
        if self._unsupported_errors and not self.gemms and not skipped_keys:
            raise none_measured(self._unsupported_errors)
        return True

    def _tune_gemm(self, timer: Timer, gemm: Gemm, method: Method, progress: Progress) -> bool:
        """Tune a GEMM; return whether the user interrupted the search."""
        try:
            result = self._search(timer, gemm, method, progress)
        except Unsupported as reason:
            self._unsupported_errors.append(reason)
            self.untuned_gemms.append(UntunedGemm(gemm, reason.message, wrong=False))
            return False
        if isinstance(result, UntunedGemm):
            self.untuned_gemms.append(result)
            return False
        self.gemms[result.key] = result
        return result.stopped == "interrupted"

    def _search(
        self, timer: Timer, gemm: Gemm, method: Method, progress: Progress
    ) -> TunedGemm | UntunedGemm:
        spec, limits, begin_s = self._spec, self._search_limits, timer.now_s()

        def is_over(share: float) -> bool:
            return timer.now_s() - begin_s >= share * limits.time_s

        with closing(self._gpu.blas(spec.library)) as blas:
            is_listing_over = partial(is_over, _LISTING_TIME_SHARE)
            candidate_list = candidates(
                blas, gemm, spec.settings, seed=spec.seed, is_over=is_listing_over
            )
        workload = GemmWorkload(gemm, spec.settings, spec.library, spec.fill)
        trials = AlgorithmTrials(timer, workload, method, candidate_list.algorithms, seed=spec.seed)
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
                len(candidate_list.algorithms),
                limits,
                seed=spec.seed,
                now_s=timer.now_s,
                begin_s=begin_s,
                progress=progress,
            )
            if not outcome.is_significant:
                trials.verify(DEFAULT_CANDIDATE)
            return _tuned_gemm(spec, gemm, limits, candidate_list, trials, outcome)

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


def _prefix_stages(progress: Progress, title: str) -> Progress:
    """Return a Progress that prefixes every stage with a title."""
    return lambda stage, fraction: progress(f"{title}: {stage}", fraction)


def _tuned_gemm(
    spec: GemmSpec,
    gemm: Gemm,
    limits: Limits,
    candidate_list: Candidates,
    trials: AlgorithmTrials,
    outcome: Outcome,
) -> TunedGemm:
    """Return the result of the search for one GEMM."""
    default_s = trials.times_s(DEFAULT_CANDIDATE, outcome.rounds)
    winner_s = trials.times_s(outcome.winner_index, outcome.rounds)
    return TunedGemm(
        gemm=gemm,
        shape=spec.shapes.get(gemm, ""),
        settings=spec.settings,
        winner=candidate_list.algorithms[outcome.winner_index],
        default=candidate_list.algorithms[DEFAULT_CANDIDATE],
        significant=outcome.is_significant,
        gain=_missing_gain(outcome) if outcome.gain is None else outcome.gain,
        gain_interval=_gain_interval(outcome),
        default_s=_median(default_s),
        default_ci95_s=_interval(default_s),
        winner_s=_median(winner_s),
        winner_ci95_s=_interval(winner_s),
        verification=trials.verifications[outcome.winner_index],
        tried=outcome.tried_count,
        candidates=len(candidate_list.algorithms),
        all_listed=candidate_list.complete,
        wrong=tuple(candidate_list.algorithms[number] for number in outcome.wrong_finalists),
        rounds=outcome.rounds,
        stopped=outcome.stop_reason,
        limits=limits,
        method=trials.method,
        seed=spec.seed,
    )


def _gain_interval(outcome: Outcome) -> tuple[float, float] | Unavailable:
    if outcome.gain is None:
        return _missing_gain(outcome)
    return outcome.gain_interval or _TOO_FEW_SAMPLES


def _missing_gain(outcome: Outcome) -> Unavailable:
    return _INTERRUPTED if outcome.stop_reason == "interrupted" else _NO_FINAL


def _median(times_s: tuple[float, ...]) -> float | Unavailable:
    return median(times_s) if times_s else _NO_SAMPLE


def _interval(times_s: tuple[float, ...]) -> tuple[float, float] | Unavailable:
    return median_ci(times_s, correlation=autocorrelation_time(times_s)) if times_s else _NO_SAMPLE
