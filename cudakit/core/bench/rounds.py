"""Rounds: one measurement in parts, each with its memory anew, and the whole of them.

Where buffers lie decides on which channels and pages of the memory they share: the same kernel on other
buffers is faster or slower by more than its samples scatter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from cudakit.core.bench.measured import Measured
from cudakit.core.bench.method import Method
from cudakit.core.bench.samples import Samples
from cudakit.core.bench.warmup import most_warmup_s

# A device that has just been at work settles sooner than one that was idle.
LATER_WARMUP = 0.2


def parts(method: Method) -> Iterator[Method]:
    """Yield the method of each round: its share of samples and of time."""
    count, rule = method.rounds, method.rule
    share = replace(
        rule,
        min_samples=math.ceil(rule.min_samples / count),
        min_time_s=rule.min_time_s / count,
        timeout_s=rule.timeout_s / count,
        # The interval of all is narrower than that of each by the root of their number.
        precision=rule.precision * count**0.5,
    )
    most_s = method.warmup_most_s
    most_s = most_warmup_s(method.warmup_s) if most_s is None else most_s
    for number in range(count):
        part = LATER_WARMUP if number else 1.0
        yield replace(
            method,
            warmup_s=part * method.warmup_s,
            warmup_most_s=part * most_s,
            energy_s=method.energy_s if number == count - 1 else 0.0,
            rule=share,
        )


def whole(rounds: Sequence[Measured], method: Method) -> Measured:
    """Put the rounds of one workload together. One with a wrong value leaves no samples at all."""
    first, last = rounds[0], rounds[-1]
    asked = replace(
        first.method, rule=method.rule, warmup_most_s=method.warmup_most_s, energy_s=method.energy_s
    )
    if len(rounds) == 1:
        return replace(first, method=asked)
    return replace(
        first,
        method=replace(
            asked,
            warmup_s=sum(each.method.warmup_s for each in rounds),
            blocker=all(each.method.blocker for each in rounds),
            rounds=len(rounds),
        ),
        samples=_samples(rounds),
        verification=max(
            (each.verification for each in rounds),
            key=lambda found: (not found.passed, found.error),
        ),
        stopped=_stopped([each.stopped for each in rounds]),
        settled=all(each.settled for each in rounds),
        cold=all(each.cold for each in rounds),
        warmup=tuple(chain.from_iterable(each.warmup for each in rounds)),
        discarded=tuple(chain.from_iterable(each.discarded for each in rounds)),
        floor_s=min(each.floor_s for each in rounds),
        after=last.after,
        executions=sum(each.executions for each in rounds),
        energy_j=last.energy_j,
        elapsed_s=sum(each.elapsed_s for each in rounds),
        notes=tuple(dict.fromkeys(chain.from_iterable(each.notes for each in rounds))),
    )


def _samples(rounds: Sequence[Measured]) -> Samples:
    found = [each.samples for each in rounds]
    discarded = sum(samples.discarded for samples in found)
    if not all(each.verification.passed for each in rounds):
        return Samples((), discarded=discarded, converged=False)
    clocks = all(len(samples.sm_clock_hz) == len(samples.times_s) for samples in found)
    return Samples(
        times_s=tuple(chain.from_iterable(samples.times_s for samples in found)),
        sm_clock_hz=tuple(chain.from_iterable(s.sm_clock_hz for s in found)) if clocks else (),
        discarded=discarded,
        converged=all(samples.converged for samples in found),
        rounds=tuple(len(samples.times_s) for samples in found),
    )


def _stopped(reasons: Sequence[str]) -> str:
    """Name the worst of the reasons for which rounds ended."""
    for worst in ("wrong", "interrupted", "timeout", "stable"):
        if worst in reasons:
            return worst
    return reasons[-1]
