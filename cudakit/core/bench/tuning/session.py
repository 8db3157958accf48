"""Tuning: an algorithm for each product of a Spec, searched for on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from cudakit.core.bench.blocker import hindrance
from cudakit.core.bench.case import Case, check_fit
from cudakit.core.bench.method import Method
from cudakit.core.bench.runner import collector_off
from cudakit.core.bench.spec import GemmSpec
from cudakit.core.bench.timer import Timer
from cudakit.core.bench.tuning.candidates import candidates
from cudakit.core.bench.tuning.conclusion import product_of
from cudakit.core.bench.tuning.contest import AlgorithmContest
from cudakit.core.bench.tuning.limits import Limits
from cudakit.core.bench.tuning.search import DEFAULT, search
from cudakit.core.bench.tuning.tuned import (
    Tuned,
    TunedMachine,
    TunedProduct,
    Untuned,
    machine_of,
)
from cudakit.core.bench.workloads import WORKLOADS
from cudakit.core.bench.workloads.gemm import GemmWorkload
from cudakit.errors import Unsupported, UsageError
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.gemm import Gemm
from cudakit.gpu.api.run_context import RunContext

# Long enough that events resolve 0.1 % of it, short enough for thousands of candidates.
_SAMPLE_S = 2e-3
# Of the time for a product, when the library is to have named its algorithms, and the device to have settled.
_LISTED_BY, _WARM_BY = 0.15, 0.3

Progress: TypeAlias = Callable[[str, float], None]


def tuning_machine(gpu: Gpu, run_context: RunContext) -> TunedMachine:
    """Describe the machine that algorithms are tuned on, or are to be used on."""
    with closing(gpu.blas("cublaslt")) as blas:
        return machine_of(gpu.facts(), blas.library, blas.version, run_context.versions)


def tune(
    spec: GemmSpec,
    gpu: Gpu,
    limits: Limits,
    progress: Progress = lambda stage, fraction: None,  # noqa: ARG005
    *,
    known: Tuned | None = None,
    run_context: RunContext | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> Tuned:
    """Search for the fastest algorithm of each product; what is ``known`` to the end is kept as it is.

    An interrupt, which ``progress`` may raise, leaves what is found by then. Raises UsageError for a library
    whose algorithms cannot be chosen, InputError for what does not fit in memory or was tuned on an unlike
    machine, Unsupported where nothing can be tuned, and what the device raises.
    """
    if spec.library != "cublaslt" or spec.rivals:
        raise UsageError(
            "only algorithms of cublaslt can be chosen, and nothing else takes part",
            hint="leave out --library and --vs",
        )
    begin_ns = now_ns()
    run_context = run_context or RunContext()
    machine = tuning_machine(gpu, run_context)
    session = _Session(spec, gpu, limits, hindered=bool(hindrance(run_context.variables)))
    cases = dict(zip(spec.gemms, WORKLOADS[spec.bench](spec, gpu), strict=True))
    check_fit(tuple(cases.values()), gpu.memory_info().free_bytes)
    kept = known.products_on(machine) if known else {}
    complete = session.tune_all(cases, {key: p for key, p in kept.items() if _is_done(p)}, progress)
    others = {key: product for key, product in kept.items() if key not in session.products}
    return Tuned(
        simulated=gpu.simulated,
        time_ns=begin_ns,
        complete=complete,
        machine=machine,
        warnings=tuple(session.warnings()),
        products=(*others.values(), *session.products.values()),
        untuned=tuple(session.untuned),
    )


def _is_done(product: TunedProduct) -> bool:
    return product.stopped != "interrupted"


class _Session:
    """What has been found so far."""

    def __init__(self, spec: GemmSpec, gpu: Gpu, limits: Limits, *, hindered: bool) -> None:
        self.products: dict[object, TunedProduct] = {}
        self.untuned: list[Untuned] = []
        self._refusals: list[Unsupported] = []
        self._spec, self._gpu, self._limits, self._hindered = spec, gpu, limits, hindered

    def tune_all(
        self, cases: Mapping[Gemm, Case], kept: Iterable[object], progress: Progress
    ) -> bool:
        """Tune what is not known yet; True means that nothing is missing."""
        missing = [gemm for gemm in cases if (gemm, self._spec.settings) not in kept]
        try:
            with closing(Timer(self._gpu)) as timer:
                for at, gemm in enumerate(missing):
                    part = _part(progress, cases[gemm].title, at, len(missing))
                    if self._tune_one(timer, gemm, self._method(cases[gemm].method), part):
                        return False
        except KeyboardInterrupt:
            if not self.products:
                raise
            return False
        if self._refusals and not self.products and not kept:
            raise self._refusals[0]
        return True

    def warnings(self) -> Iterator[str]:
        """Say what should make a reader doubt."""
        if self._hindered:
            yield "gaps between launches count: what is set in the environment keeps them from being hidden"

    def _tune_one(self, timer: Timer, gemm: Gemm, method: Method, progress: Progress) -> bool:
        """Tune a product; True means that the user broke it off."""
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
        contest = AlgorithmContest(timer, workload, method, found.algorithms, seed=spec.seed)
        with closing(contest), collector_off():
            if not contest.verify(DEFAULT):
                why = contest.verifications[DEFAULT].detail or "an error beyond rounding"
                return Untuned(gemm, f"the library's own choice computes wrong values: {why}", True)
            contest.warm_up(partial(is_over, _WARM_BY), partial(progress, "warming up"))
            outcome = search(
                contest,
                len(found.algorithms),
                limits,
                seed=spec.seed,
                now=timer.now_s,
                begin_s=begin_s,
                tell=progress,
            )
            if not outcome.significant:
                contest.verify(DEFAULT)
            return product_of(spec, gemm, limits, found, contest, outcome)

    def _method(self, method: Method) -> Method:
        """Measure as always, but in shorter samples, and what takes turns in one round."""
        return replace(
            method,
            rounds=1,
            # In virtual time nothing is gained by the mean of many.
            sample_s=0.0 if self._gpu.simulated else _SAMPLE_S,
            warmup_s=0.0 if self._gpu.simulated else method.warmup_s,
            blocker=method.blocker and not self._hindered,
            seed=self._spec.seed,
            interleaved=("other algorithms",),
        )


def _part(progress: Progress, title: str, at: int, count: int) -> Progress:
    """Tell of the progress of one product as that of all."""
    return lambda stage, fraction: progress(f"{title}: {stage}", (at + fraction) / count)
