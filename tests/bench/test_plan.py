from __future__ import annotations

from dataclasses import replace

import pytest
from bench.workloads import Copy
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.case import Case
from cudakit.bench.launch import LaunchSpec
from cudakit.bench.method import Method, Rule
from cudakit.bench.plan import plan_method, round_methods, share_budget

METHOD = Method("batch", "rotate", warmup_s=1.0, rounds=5, rule=Rule(min_time_s=2.0))


def plan_within(method: Method, share_s: float | None, implementations: int) -> Method:
    return plan_method(method, share_s, implementations, {})


def test_method_without_budget_is_unchanged() -> None:
    assert plan_within(METHOD, None, 2) is METHOD
    assert plan_within(METHOD, 1e6, 2) == replace(METHOD, warmup_most_s=3.0)


@given(st.floats(-10, 100), st.integers(1, 4))
def test_interleaved_methods_fit_budget_share(share_s: float, implementations: int) -> None:
    planned = plan_within(METHOD, share_s, implementations)

    warmups_s = implementations * sum(part.warmup_most_s or 0 for part in round_methods(planned))
    assert planned.warmup_s <= (planned.warmup_most_s or 0)
    assert warmups_s <= 0.25 * max(share_s, 1e-3) * (1 + 1e-9)
    assert warmups_s + planned.rule.timeout_s <= max(share_s, 1e-3) * (1 + 1e-9)
    assert 0 < planned.rule.min_time_s < planned.rule.timeout_s
    assert planned.rule.min_samples == METHOD.rule.min_samples


def test_short_budget_has_fewer_rounds() -> None:
    assert [plan_within(METHOD, share_s, 1).rounds for share_s in (0.5, 2.5, 60.0)] == [1, 2, 5]


def test_variable_that_synchronizes_launches_disables_blocking_kernel() -> None:
    assert not plan_method(METHOD, None, 1, {"CUDA_LAUNCH_BLOCKING": "1"}).blocker
    assert plan_method(METHOD, None, 1, {"CUDA_LAUNCH_BLOCKING": "0"}).blocker


def test_no_case_begins_after_twice_the_budget() -> None:
    cases = tuple(Case(Copy(), METHOD) for _ in range(4))
    times_s = iter([0.0, 0.0, 1.0, 7.0])

    shares = list(share_budget(LaunchSpec(budget_s=3.0), cases, lambda: next(times_s)))

    assert shares == [(cases[0], 0.75), (cases[1], pytest.approx(2 / 3))]


def test_first_case_begins_after_any_time() -> None:
    cases = (Case(Copy(), METHOD),)
    times_s = iter([0.0, 100.0])

    assert len(list(share_budget(LaunchSpec(budget_s=1.0), cases, lambda: next(times_s)))) == 1
