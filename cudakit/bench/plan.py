"""Plan the cases of a Spec and the measurement method of each case, which fits the time budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from cudakit.bench.case import Case
from cudakit.bench.method import Method, max_warmup_s
from cudakit.bench.spec import GdsSpec, Spec
from cudakit.bench.timer import disabling_variable
from cudakit.bench.workloads.gds import gds_cases
from cudakit.gpu.api import Gpu

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


def plan_cases(spec: Spec, gpu: Gpu) -> tuple[Case, ...]:
    """Return the cases of a Spec. Raises Unsupported if the device does not support any."""
    return gds_cases(spec, gpu) if isinstance(spec, GdsSpec) else spec.cases(gpu)


def share_budget(
    spec: Spec, cases: Sequence[Case], now_s: Callable[[], float]
) -> Iterator[tuple[Case, float | None]]:
    """Yield each case with its equal share of the remaining time budget, or None without a budget.

    Cases after the first one are not yielded once _MAX_BUDGETS times the budget has passed.
    """
    if spec.budget_s is None:
        yield from ((case, None) for case in cases)
        return
    begin_s = now_s()
    for index, case in enumerate(cases):
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

    The blocking kernel is not used if environment ``variables`` would make it time out.
    """
    if simulated:
        method = replace(method, sample_s=min(method.sample_s, _SIMULATED_SAMPLE_S))
    if disabling_variable(variables):
        method = replace(method, blocker=False)
    return method if share_s is None else _shorten_method(method, share_s, implementation_count)


def without_settling(method: Method) -> Method:
    """Return the measurement method without warm-up, energy and minimum times, in one round."""
    return replace(
        method, warmup_s=0.0, energy_s=0.0, rounds=1, rule=replace(method.rule, min_time_s=0.0)
    )


def round_methods(method: Method) -> Iterator[Method]:
    """Yield the measurement method of each round, with the share of samples and time of this round.

    Each round has its own buffers. Their addresses determine which memory channels and pages they share, so
    the time of a kernel differs more between rounds than within a round.
    """
    round_count, rule = method.rounds, method.rule
    round_rule = replace(
        rule,
        min_samples=math.ceil(rule.min_samples / round_count),
        min_time_s=rule.min_time_s / round_count,
        timeout_s=rule.timeout_s / round_count,
        # The CI of all rounds is narrower than the CI of one round by the square root of the number of
        # rounds.
        precision=rule.precision * round_count**0.5,
    )
    longest_warmup_s = method.warmup_most_s
    longest_warmup_s = (
        max_warmup_s(method.warmup_s) if longest_warmup_s is None else longest_warmup_s
    )
    for index in range(round_count):
        warmup_share = _LATER_WARMUP_SHARE if index else 1.0
        yield replace(
            method,
            warmup_s=warmup_share * method.warmup_s,
            warmup_most_s=warmup_share * longest_warmup_s,
            energy_s=method.energy_s if index == round_count - 1 else 0.0,
            rule=round_rule,
        )


def _shorten_method(method: Method, share_s: float, implementation_count: int) -> Method:
    """Shorten a measurement method so that all implementations take ``share_s``, but keep ``min_samples``."""
    share_s = max(share_s, 1e-3)
    round_count = max(1, min(method.rounds, int(share_s / _MIN_ROUND_S)))
    warmup_count = implementation_count * (1 + _LATER_WARMUP_SHARE * (round_count - 1))
    longest_warmup_s = _WARMUP_SHARE * share_s / warmup_count
    timeout_s = min(method.rule.timeout_s, (1 - _WARMUP_SHARE) * share_s)
    min_time_s = min(method.rule.min_time_s, timeout_s / 2)
    has_energy = implementation_count * method.energy_s <= _ENERGY_SHARE * share_s
    return replace(
        method,
        warmup_s=min(method.warmup_s, longest_warmup_s),
        warmup_most_s=min(max_warmup_s(method.warmup_s), longest_warmup_s),
        rule=replace(method.rule, timeout_s=timeout_s, min_time_s=min_time_s),
        rounds=round_count,
        energy_s=method.energy_s if has_energy else 0.0,
    )
