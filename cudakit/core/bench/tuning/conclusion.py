"""What there is to say of a product once its search has ended."""

from __future__ import annotations

from statistics import median

from cudakit.core.bench.spec import GemmSpec
from cudakit.core.bench.stats import dependence, median_interval
from cudakit.core.bench.tuning.candidates import Candidates
from cudakit.core.bench.tuning.contest import AlgorithmContest
from cudakit.core.bench.tuning.limits import Limits
from cudakit.core.bench.tuning.search import DEFAULT, Outcome
from cudakit.core.bench.tuning.tuned import TunedProduct
from cudakit.gpu.api.gemm import Gemm
from cudakit.units import Unavailable

_NO_FINAL = Unavailable("no other algorithm came into the final")
_TOO_FEW = Unavailable("too few samples to be that sure")
_NO_SAMPLE = Unavailable("there was nothing to compare it with")


def product_of(
    spec: GemmSpec,
    gemm: Gemm,
    limits: Limits,
    found: Candidates,
    contest: AlgorithmContest,
    outcome: Outcome,
) -> TunedProduct:
    """Put together what was asked, found and measured."""
    default_s = contest.times_s(DEFAULT, outcome.rounds)
    winner_s = contest.times_s(outcome.winner, outcome.rounds)
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
        verification=contest.verifications[outcome.winner],
        tried=outcome.tried,
        candidates=len(found.algorithms),
        all_listed=found.complete,
        wrong=tuple(found.algorithms[number] for number in outcome.wrong),
        rounds=outcome.rounds,
        stopped=outcome.stopped,
        limits=limits,
        method=contest.method,
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
