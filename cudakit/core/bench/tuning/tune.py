"""Tuning: search the fastest algorithm for each GEMM of a Spec on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from statistics import median

from cudakit.core.bench.case import Case, check_fit
from cudakit.core.bench.method import Method
from cudakit.core.bench.pipeline import garbage_collection_off, no_progress, part_of
from cudakit.core.bench.plan import plan_cases
from cudakit.core.bench.prepare import Progress
from cudakit.core.bench.spec import GemmSpec
from cudakit.core.bench.stats import dependence, median_interval
from cudakit.core.bench.timer import Timer, disabling_variable
from cudakit.core.bench.tuning.candidates import Candidates, candidates
from cudakit.core.bench.tuning.search import DEFAULT, Limits, Outcome, search
from cudakit.core.bench.tuning.trials import AlgorithmTrials
from cudakit.core.bench.tuning.tuned import Tuned, TunedMachine, TunedProduct, Untuned
from cudakit.core.bench.workloads.gemm import GemmWorkload
from cudakit.errors import Unsupported, UsageError
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import NOT_ASKED
from cudakit.gpu.api.gemm import Gemm
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

# Long enough that events resolve 0.1 % of it, short enough for thousands of candidates.
_SAMPLE_S = 2e-3
# Shares of the time of a GEMM after which listing algorithms, and warming up, end.
_LISTED_BY, _WARM_BY = 0.15, 0.3

_UNBLOCKED = (
    "gaps between launches count: what is set in the environment keeps them from being hidden"
)
_NOT_SAID = Unavailable("the device does not say")
_NO_FINAL = Unavailable("no other algorithm came into the final")
_TOO_FEW = Unavailable("too few samples to be that sure")
_NO_SAMPLE = Unavailable("there was nothing to compare it with")


def tuning_machine(gpu: Gpu, run_context: RunContext) -> TunedMachine:
    """Return the machine that algorithms are tuned on or used on."""
    fields, versions = gpu.facts().fields, run_context.versions
    gpu_name, capability = (
        value if isinstance(value, Unavailable) else str(value)
        for value in (fields.get(name, _NOT_SAID) for name in ("name", "compute_capability"))
    )
    with closing(gpu.blas("cublaslt")) as blas:
        return TunedMachine(
            gpu=gpu_name,
            compute_capability=capability,
            library=blas.library,
            library_version=blas.version,
            driver=versions.get("driver", NOT_ASKED),
            cudakit=versions.get("cudakit", NOT_ASKED),
        )


def tune(
    spec: GemmSpec,
    gpu: Gpu,
    limits: Limits,
    progress: Progress = no_progress,
    *,
    known: Tuned | None = None,
    run_context: RunContext | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> Tuned:
    """Search for the fastest algorithm of each GEMM; complete results in ``known`` are kept.

    An interrupt, which ``progress`` may raise, leaves what is found by then. Raises UsageError for a library
    whose algorithms cannot be chosen, InputError for what does not fit in memory or was tuned on an unlike
    machine, Unsupported where nothing can be tuned, and what the device raises.
    """
    if spec.library != "cublaslt" or spec.baselines:
        raise UsageError(
            "only algorithms of cublaslt can be chosen, and nothing else takes part",
            hint="leave out --library and --vs",
        )
    begin_ns = now_ns()
    run_context = run_context or RunContext()
    machine = tuning_machine(gpu, run_context)
    unblocked = bool(disabling_variable(run_context.variables))
    session = _Session(spec, gpu, limits, unblocked=unblocked)
    cases = dict(zip(spec.gemms, plan_cases(spec, gpu), strict=True))
    check_fit(tuple(cases.values()), gpu.memory_info().free_bytes)
    kept = known.products_on(machine) if known else {}
    complete = session.tune_all(cases, {key: p for key, p in kept.items() if _is_done(p)}, progress)
    others = {key: product for key, product in kept.items() if key not in session.products}
    return Tuned(
        simulated=gpu.simulated,
        time_ns=begin_ns,
        complete=complete,
        machine=machine,
        warnings=(_UNBLOCKED,) if unblocked else (),
        products=(*others.values(), *session.products.values()),
        untuned=tuple(session.untuned),
    )


def _is_done(product: TunedProduct) -> bool:
    return product.stopped != "interrupted"


class _Session:
    """The results so far."""

    def __init__(self, spec: GemmSpec, gpu: Gpu, limits: Limits, *, unblocked: bool) -> None:
        self.products: dict[object, TunedProduct] = {}
        self.untuned: list[Untuned] = []
        self._refusals: list[Unsupported] = []
        self._spec, self._gpu, self._limits, self._unblocked = spec, gpu, limits, unblocked

    def tune_all(
        self, cases: Mapping[Gemm, Case], kept: Iterable[object], progress: Progress
    ) -> bool:
        """Tune the missing GEMMs; return whether all were tuned."""
        missing = [gemm for gemm in cases if (gemm, self._spec.settings) not in kept]
        try:
            with closing(Timer(self._gpu)) as timer:
                for at, gemm in enumerate(missing):
                    part = _titled(part_of(progress, at, len(missing)), cases[gemm].title)
                    if self._tune_one(timer, gemm, self._method(cases[gemm].method), part):
                        return False
        except KeyboardInterrupt:
            if not self.products:
                raise
            return False
        if self._refusals and not self.products and not kept:
            raise self._refusals[0]
        return True

    def _tune_one(self, timer: Timer, gemm: Gemm, method: Method, progress: Progress) -> bool:
        """Tune a GEMM; return whether the user interrupted it."""
        try:
            found = self._search(timer, gemm, method, progress)
        except Unsupported as refusal:
            self._refusals.append(refusal)
            self.untuned.append(Untuned(gemm, refusal.message, wrong=False))
            return False
        if isinstance(found, Untuned):
            self.untuned.append(found)
            return False
        self.products[found.key] = found
        return found.stopped == "interrupted"

    def _search(
        self, timer: Timer, gemm: Gemm, method: Method, progress: Progress
    ) -> TunedProduct | Untuned:
        spec, limits, begin_s = self._spec, self._limits, timer.now_s()

        def is_over(share: float) -> bool:
            return timer.now_s() - begin_s >= share * limits.time_s

        with closing(self._gpu.blas(spec.library)) as blas:
            listed = partial(is_over, _LISTED_BY)
            found = candidates(blas, gemm, spec.settings, seed=spec.seed, is_over=listed)
        workload = GemmWorkload(gemm, spec.settings, spec.library, spec.fill)
        trials = AlgorithmTrials(timer, workload, method, found.algorithms, seed=spec.seed)
        with closing(trials), garbage_collection_off():
            if not trials.verify(DEFAULT):
                why = trials.verifications[DEFAULT].detail or "an error beyond rounding"
                return Untuned(gemm, f"the library's own choice computes wrong values: {why}", True)
            trials.warm_up(partial(is_over, _WARM_BY), partial(progress, "warming up"))
            outcome = search(
                trials,
                len(found.algorithms),
                limits,
                seed=spec.seed,
                now=timer.now_s,
                begin_s=begin_s,
                progress=progress,
            )
            if not outcome.significant:
                trials.verify(DEFAULT)
            return _tuned_product(spec, gemm, limits, found, trials, outcome)

    def _method(self, method: Method) -> Method:
        """Return the method of trials: shorter samples, interleaved, in one round."""
        return replace(
            method,
            rounds=1,
            # In virtual time a mean gains nothing.
            sample_s=0.0 if self._gpu.simulated else _SAMPLE_S,
            warmup_s=0.0 if self._gpu.simulated else method.warmup_s,
            blocker=method.blocker and not self._unblocked,
            seed=self._spec.seed,
            interleaved=("other algorithms",),
        )


def _titled(progress: Progress, title: str) -> Progress:
    """Prefix every stage with a title."""
    return lambda stage, fraction: progress(f"{title}: {stage}", fraction)


def _tuned_product(
    spec: GemmSpec,
    gemm: Gemm,
    limits: Limits,
    found: Candidates,
    trials: AlgorithmTrials,
    outcome: Outcome,
) -> TunedProduct:
    """Combine what was asked, found and measured."""
    default_s = trials.times_s(DEFAULT, outcome.rounds)
    winner_s = trials.times_s(outcome.winner, outcome.rounds)
    return TunedProduct(
        gemm=gemm,
        shape=spec.shapes.get(gemm, ""),
        settings=spec.settings,
        winner=found.algorithms[outcome.winner],
        default=found.algorithms[DEFAULT],
        significant=outcome.significant,
        gain=_NO_FINAL if outcome.gain is None else outcome.gain,
        gain_interval=_gain_interval(outcome),
        default_s=_median(default_s),
        default_ci95_s=_interval(default_s),
        winner_s=_median(winner_s),
        winner_ci95_s=_interval(winner_s),
        verification=trials.verifications[outcome.winner],
        tried=outcome.tried,
        candidates=len(found.algorithms),
        all_listed=found.complete,
        wrong=tuple(found.algorithms[number] for number in outcome.wrong),
        rounds=outcome.rounds,
        stopped=outcome.stopped,
        limits=limits,
        method=trials.method,
        seed=spec.seed,
    )


def _gain_interval(outcome: Outcome) -> tuple[float, float] | Unavailable:
    if outcome.gain is None:
        return _NO_FINAL
    return outcome.gain_interval or _TOO_FEW


def _median(times_s: tuple[float, ...]) -> float | Unavailable:
    return median(times_s) if times_s else _NO_SAMPLE


def _interval(times_s: tuple[float, ...]) -> tuple[float, float] | Unavailable:
    return median_interval(times_s, dependence=dependence(times_s)) if times_s else _NO_SAMPLE
