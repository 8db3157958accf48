"""Plan: the cases that a Spec asks for, and the method of each within its budget, round by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

from cudakit.core.bench.case import Case
from cudakit.core.bench.method import Method, most_warmup_s
from cudakit.core.bench.spec import Spec
from cudakit.core.bench.timer import disabling_variable
from cudakit.core.bench.workloads.alloc import alloc_cases
from cudakit.core.bench.workloads.copy import copy_cases
from cudakit.core.bench.workloads.gemm import gemm_cases
from cudakit.core.bench.workloads.graph import graph_cases
from cudakit.core.bench.workloads.launch import launch_cases
from cudakit.core.bench.workloads.memory import memory_cases
from cudakit.gpu.api import Gpu

# Makes the cases of one bench from its Spec; nothing is allocated until a case is prepared.
CasesOf: TypeAlias = Callable[[Any, Gpu], tuple[Case, ...]]

WORKLOADS: Mapping[str, CasesOf] = MappingProxyType(
    {
        "gemm": gemm_cases,
        "memory": memory_cases,
        "copy": copy_cases,
        "launch": launch_cases,
        "alloc": alloc_cases,
        "graph": graph_cases,
    }
)

# Largest share of the time of a case for the warm-up of all implementations.
_WARMUP_SHARE = 0.25
# A shorter round mostly makes and checks its buffers.
_LEAST_ROUND_S = 1.0
# Energy is measured only if it takes at most this share.
_ENERGY_SHARE = 0.2
# A device that was just busy settles sooner than one that was idle.
_LATER_WARMUP = 0.2


def plan_cases(spec: Spec, gpu: Gpu) -> tuple[Case, ...]:
    """Return the cases of a Spec. Raises what the workloads raise for what the device does not have."""
    return WORKLOADS[spec.bench](spec, gpu)


def plan_method(
    method: Method, share_s: float | None, implementations: int, variables: Mapping[str, str]
) -> Method:
    """Return the method of a case within its share of the time budget.

    The blocking kernel is left out if ``variables`` of the environment would make it time out.
    """
    if disabling_variable(variables):
        method = replace(method, blocker=False)
    return method if share_s is None else _within(method, share_s, implementations)


def without_settling(method: Method) -> Method:
    """Return the method without the times that only a real device needs to settle."""
    return replace(
        method, warmup_s=0.0, energy_s=0.0, rounds=1, rule=replace(method.rule, min_time_s=0.0)
    )


def round_methods(method: Method) -> Iterator[Method]:
    """Yield the method of each round: its share of samples and time.

    Each round has buffers of its own: their addresses determine which channels and pages of the memory they
    share, so that the same kernel on other buffers differs by more than its samples scatter.
    """
    count, rule = method.rounds, method.rule
    share = replace(
        rule,
        min_samples=math.ceil(rule.min_samples / count),
        min_time_s=rule.min_time_s / count,
        timeout_s=rule.timeout_s / count,
        # The CI of all rounds is narrower than that of each by the root of their number.
        precision=rule.precision * count**0.5,
    )
    most_s = method.warmup_most_s
    most_s = most_warmup_s(method.warmup_s) if most_s is None else most_s
    for number in range(count):
        part = _LATER_WARMUP if number else 1.0
        yield replace(
            method,
            warmup_s=part * method.warmup_s,
            warmup_most_s=part * most_s,
            energy_s=method.energy_s if number == count - 1 else 0.0,
            rule=share,
        )


def _within(method: Method, share_s: float, implementations: int) -> Method:
    """Shorten a method to a time for all implementations. The least number of samples is always taken."""
    share_s = max(share_s, 1e-3)
    rounds = max(1, min(method.rounds, int(share_s / _LEAST_ROUND_S)))
    warmups = implementations * (1 + _LATER_WARMUP * (rounds - 1))
    most_s = _WARMUP_SHARE * share_s / warmups
    timeout_s = min(method.rule.timeout_s, (1 - _WARMUP_SHARE) * share_s)
    least_s = min(method.rule.min_time_s, timeout_s / 2)
    has_energy = implementations * method.energy_s <= _ENERGY_SHARE * share_s
    return replace(
        method,
        warmup_s=min(method.warmup_s, most_s),
        warmup_most_s=min(most_warmup_s(method.warmup_s), most_s),
        rule=replace(method.rule, timeout_s=timeout_s, min_time_s=least_s),
        rounds=rounds,
        energy_s=method.energy_s if has_energy else 0.0,
    )
