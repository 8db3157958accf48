"""A time for all cases together, and what of a method is cut where it is short."""

from __future__ import annotations

from dataclasses import replace

from cudakit.core.bench.method import Method

# Of the time that a case may take, the warm-up of all who take turns at most this share.
_WARMUP_SHARE = 0.25
# A round that is shorter mostly makes and checks its buffers.
_LEAST_ROUND_S = 1.0


def within(method: Method, share_s: float | None, contenders: int) -> Method:
    """Shorten a method to a time for all who take turns; the least number of samples is taken in any case."""
    if share_s is None:
        return method
    share_s = max(share_s, 1e-3)
    warmup_s = min(method.warmup_s, _WARMUP_SHARE * share_s / contenders)
    timeout_s = min(method.rule.timeout_s, share_s - contenders * warmup_s)
    least_s = min(method.rule.min_time_s, timeout_s / 2)
    return replace(
        method,
        warmup_s=warmup_s,
        rule=replace(method.rule, timeout_s=timeout_s, min_time_s=least_s),
        rounds=max(1, min(method.rounds, int(share_s / _LEAST_ROUND_S))),
    )
