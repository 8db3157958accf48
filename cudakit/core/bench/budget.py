"""A time for all cases together, and what of a method is cut where it is short."""

from __future__ import annotations

from dataclasses import replace

from cudakit.core.bench.method import Method
from cudakit.core.bench.rounds import LATER_WARMUP
from cudakit.core.bench.warmup import most_warmup_s

# Of the time that a case may take, the warm-up of all who take turns at most this share.
_WARMUP_SHARE = 0.25
# A round that is shorter mostly makes and checks its buffers.
_LEAST_ROUND_S = 1.0
# Energy is counted where it takes at most this share.
_ENERGY_SHARE = 0.2


def within(method: Method, share_s: float | None, contenders: int) -> Method:
    """Shorten a method to a time for all who take turns; the least number of samples is taken in any case."""
    if share_s is None:
        return method
    share_s = max(share_s, 1e-3)
    rounds = max(1, min(method.rounds, int(share_s / _LEAST_ROUND_S)))
    warmups = contenders * (1 + LATER_WARMUP * (rounds - 1))
    most_s = _WARMUP_SHARE * share_s / warmups
    timeout_s = min(method.rule.timeout_s, (1 - _WARMUP_SHARE) * share_s)
    least_s = min(method.rule.min_time_s, timeout_s / 2)
    return replace(
        method,
        warmup_s=min(method.warmup_s, most_s),
        warmup_most_s=min(most_warmup_s(method.warmup_s), most_s),
        rule=replace(method.rule, timeout_s=timeout_s, min_time_s=least_s),
        rounds=rounds,
        energy_s=method.energy_s
        if contenders * method.energy_s <= _ENERGY_SHARE * share_s
        else 0.0,
    )
