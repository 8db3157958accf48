""""""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count

import pytest
from bench.workloads import Busy, Copy, PreparedCopy, busy_device
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.case import Case, Method, Rule
from cudakit.bench.launch import LaunchSpec
from cudakit.bench.memory import MemorySpec
from cudakit.bench.pipeline import plan_method, round_methods, run, share_budget
from cudakit.bench.roofline import Work
from cudakit.errors import InputError, Unsupported
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import RunContext
from cudakit.gpu.sim import Sim
from cudakit.units import Unavailable

METHOD = Method("isolated", "hot")
SPEC = LaunchSpec()


def case_of(workload: Copy, work: Work | None = None) -> Case:
    bytes_moved = 2 * workload.size_bytes
    return Case(workload, METHOD, work or Work(bytes_moved=bytes_moved), workload.size_bytes, 2)


def interrupting_after(runs: int) -> Callable[[], None]:
    calls = count()

    def interrupt() -> None:
        if next(calls) == runs:
            raise KeyboardInterrupt

    return interrupt


def test_result_records_environment_method_and_limit() -> None:
    run_context = RunContext(versions={"driver": "580"}, other_processes=0, command=("cudakit",))
    with closing(Sim()) as gpu:
        result = run(SPEC, gpu, cases=[case_of(Copy())], run_context=run_context, now_ns=lambda: 42)

    (case,) = result.results
    assert (result.bench, result.time_ns, result.complete) == ("launch", 42, True)
    assert result.simulated
    assert case.verified
    assert case.environment.versions == {"driver": "580"}
    assert case.environment.before is not None
    assert case.environment.after is not None
    assert not isinstance(case.limit, Unavailable)
    assert not isinstance(case.ratio_to_limit, Unavailable)
    assert 0 < case.ratio_to_limit < 1


def test_case_larger_than_memory_is_rejected_before_allocation() -> None:
    with closing(Sim(capacity_bytes=8 << 20)) as gpu:
        with pytest.raises(InputError, match=r"memory triad 4\.00 MiB needs") as error:
            run(MemorySpec(sizes_bytes=(1 << 20, 4 << 20)), gpu)
        assert gpu.memory_info().free_bytes == 8 << 20

    assert "would fit" in error.value.hint


def test_only_case_with_wrong_values_has_no_figures() -> None:
    with closing(Sim()) as gpu:
        result = run(SPEC, gpu, cases=[case_of(Copy(spoiled=(0, 0))), case_of(Copy())])

    wrong, correct = result.results
    assert isinstance(wrong.median_s, Unavailable)
    assert "1 words are wrong" in wrong.median_s.reason
    assert correct.verified
    assert result.complete


def test_interrupt_returns_cases_measured_so_far() -> None:
    endless = LaunchSpec(rule=Rule(min_samples=10**6, timeout_s=1e9))
    cases = [
        case_of(Copy()),
        Case(
            Copy(before_each=interrupting_after(20)),
            endless.method("isolated", "hot"),
            Work(),
            0,
            0,
        ),
        case_of(Copy()),
    ]
    with closing(Sim()) as gpu:
        result = run(SPEC, gpu, cases=cases)

    assert [len(case.samples_s) > 1 for case in result.results] == [True, True]
    assert not result.complete
    assert not result.results[1].converged


def test_interrupt_before_first_sample_of_case_keeps_earlier_cases() -> None:
    cases = [case_of(Copy()), case_of(Copy(before_each=interrupting_after(2)))]
    with closing(Sim()) as gpu:
        result = run(SPEC, gpu, cases=cases)

    assert len(result.results) == 1
    assert not result.complete


def test_interrupt_before_any_sample_propagates() -> None:
    with closing(Sim()) as gpu, pytest.raises(KeyboardInterrupt):
        run(SPEC, gpu, cases=[case_of(Copy(before_each=interrupting_after(0)))])


def test_progress_covers_all_cases() -> None:
    fractions: list[float] = []
    with closing(busy_device([40_000_000])) as gpu:
        rule = Rule(min_samples=10, min_time_s=0)
        cases = [Case(Busy(gpu), Method("isolated", "hot", rule=rule)) for _ in range(3)]
        run(SPEC, gpu, lambda _, fraction: fractions.append(fraction), cases=cases)

    assert fractions == sorted(fractions)
    assert fractions[0] < 1 / 3
    assert 2 / 3 < fractions[-1] <= 1


def test_warning_of_several_cases_appears_once() -> None:
    run_context = RunContext(other_processes=2, variables={"CUDA_LAUNCH_BLOCKING": "1"})
    with closing(Sim()) as gpu:
        result = run(SPEC, gpu, cases=[case_of(Copy()), case_of(Copy())], run_context=run_context)

    assert len([line for line in result.warnings if "2 other processes" in line]) == 1
    assert not any(case.method.blocker for case in result.results)


@pytest.mark.parametrize(
    ("hot_cases", "suffix"),
    [(0, ""), (1, " (2 cases, the first is: copy 6.00 MiB)")],
)
def test_deviation_of_some_cases_names_the_first(hot_cases: int, suffix: str) -> None:
    rotated = Method("isolated", "rotate")
    cases = [Case(Copy(size_bytes=size << 20), rotated) for size in (6, 8)]
    hot_case_list = [Case(Copy(size_bytes=1 << 20), METHOD)] * hot_cases
    with closing(Sim(capacity_bytes=40 << 20)) as gpu:
        result = run(SPEC, gpu, cases=[*cases, *hot_case_list])

    assert result.warnings == (
        f"L2 is not cold: the buffer sets are too small to overwrite the cache{suffix}",
    )


def test_budget_is_shared_among_cases() -> None:
    varying_ns = (10_000_000 * (1 + n * 7 % 10) for n in count())
    with closing(busy_device(varying_ns)) as gpu:
        rule = Rule(precision=1e-9)
        cases = [Case(Busy(gpu), Method("isolated", "hot", rule=rule)) for _ in range(4)]
        result = run(LaunchSpec(budget_s=4.0), gpu, cases=cases)
        elapsed_s = gpu.clock.now_ns / 1e9

    assert 3.5 < elapsed_s < 5.0
    assert len(result.results) == 4
    assert not any(case.converged for case in result.results)
    assert {case.stop_reason for case in result.results} == {"budget"}


def test_timeout_within_the_budget_is_the_reason_why_sampling_ended() -> None:
    varying_ns = (10_000_000 * (1 + n * 7 % 10) for n in count())
    with closing(busy_device(varying_ns)) as gpu:
        rule = Rule(precision=1e-9, timeout_s=0.5)
        cases = [Case(Busy(gpu), Method("isolated", "hot", rule=rule))]
        result = run(LaunchSpec(budget_s=100.0), gpu, cases=cases)

    assert [case.stop_reason for case in result.results] == ["timeout"]


@dataclass
class OtherLibraryCopy(Copy):
    """The same copy by another library, which may not support the copy."""

    library: str = "other"
    is_supported: bool = True

    def prepare(self, gpu: Gpu, seed: int) -> PreparedCopy:
        if not self.is_supported:
            raise Unsupported(f"{self.library} copies nothing", hint="use another")
        return super().prepare(gpu, seed)


def against(*baselines: OtherLibraryCopy, workload: Copy | None = None) -> Case:
    return replace(case_of(workload or Copy()), baselines=baselines, settings={"asked": "much"})


def test_baselines_are_interleaved_and_each_has_a_result() -> None:
    with closing(Sim()) as gpu:
        result = run(
            SPEC, gpu, cases=[against(OtherLibraryCopy(), OtherLibraryCopy(library="third"))]
        )

    assert [case.library for case in result.results] == ["cudakit", "other", "third"]
    assert {case.name for case in result.results} == {"copy"}
    assert {case.method.interleaved for case in result.results} == {("cudakit", "other", "third")}
    assert [case.settings for case in result.results] == [
        {"asked": "much"},
        {"asked": "much", "library": "other"},
        {"asked": "much", "library": "third"},
    ]
    assert all(case.verified for case in result.results)


def test_only_baseline_with_wrong_values_has_no_figures() -> None:
    with closing(Sim()) as gpu:
        ours, baseline = run(SPEC, gpu, cases=[against(OtherLibraryCopy(spoiled=(0, 0)))]).results

    assert ours.verified
    assert isinstance(baseline.median_s, Unavailable)
    assert "1 words are wrong" in baseline.median_s.reason


def test_unsupported_baseline_has_reason() -> None:
    with closing(Sim()) as gpu:
        baselines = (OtherLibraryCopy(is_supported=False), OtherLibraryCopy(library="third"))
        ours, unsupported, supported = run(SPEC, gpu, cases=[against(*baselines)]).results

    assert unsupported.median_s == unsupported.verification == Unavailable("other copies nothing")
    assert unsupported.method.mode == "isolated"
    assert ours.method.interleaved == supported.method.interleaved == ("cudakit", "third")


def test_baselines_are_measured_if_cudakit_does_not_support_case() -> None:
    with closing(Sim()) as gpu:
        unsupported = OtherLibraryCopy(library="ours", is_supported=False)
        ours, baseline = run(
            SPEC, gpu, cases=[against(OtherLibraryCopy(), workload=unsupported)]
        ).results

    assert ours.library == "cudakit"
    assert isinstance(ours.median_s, Unavailable)
    assert baseline.verified
    assert baseline.method.interleaved == ()


def test_unsupported_is_raised_if_no_library_supports_case() -> None:
    unsupported = OtherLibraryCopy(library="ours", is_supported=False)
    with closing(Sim()) as gpu, pytest.raises(Unsupported, match="ours copies nothing"):
        run(SPEC, gpu, cases=[against(OtherLibraryCopy(is_supported=False), workload=unsupported)])


def test_run_without_a_supported_case_names_the_reasons_of_all() -> None:
    cases = [
        against(workload=OtherLibraryCopy(library=library, is_supported=False))
        for library in ("ours", "ours", "theirs")
    ]
    with closing(Sim()) as gpu, pytest.raises(Unsupported) as caught:
        run(SPEC, gpu, cases=cases)

    assert (
        caught.value.message
        == "no case can be measured: ours copies nothing; theirs copies nothing"
    )


def test_budget_covers_interleaved_baselines() -> None:
    varying_ns = (10_000_000 * (1 + n * 7 % 10) for n in count())
    with closing(busy_device(varying_ns)) as gpu:
        rule = Rule(precision=1e-9)
        cases = [
            Case(Busy(gpu), Method("isolated", "hot", rule=rule), baselines=(BusyBaseline(gpu),))
            for _ in range(2)
        ]
        run(LaunchSpec(budget_s=4.0), gpu, cases=cases)
        elapsed_s = gpu.clock.now_ns / 1e9

    assert 3.5 < elapsed_s < 5.0


@dataclass
class BusyBaseline(Busy):
    library: str = "other"


PLANNED_METHOD = Method("batch", "rotate", warmup_s=1.0, rounds=5, rule=Rule(min_time_s=2.0))


def plan_within(method: Method, share_s: float | None, implementations: int) -> Method:
    return plan_method(method, share_s, implementations, {})


def test_method_without_budget_is_unchanged() -> None:
    assert plan_within(PLANNED_METHOD, None, 2) is PLANNED_METHOD
    assert plan_within(PLANNED_METHOD, 1e6, 2) == replace(PLANNED_METHOD, warmup_most_s=3.0)


@given(st.floats(-10, 100), st.integers(1, 4))
def test_interleaved_methods_fit_budget_share(share_s: float, implementations: int) -> None:
    planned = plan_within(PLANNED_METHOD, share_s, implementations)

    warmups_s = implementations * sum(part.warmup_most_s or 0 for part in round_methods(planned))
    assert planned.warmup_s <= (planned.warmup_most_s or 0)
    assert warmups_s <= 0.25 * max(share_s, 1e-3) * (1 + 1e-9)
    assert warmups_s + planned.rule.timeout_s <= max(share_s, 1e-3) * (1 + 1e-9)
    assert 0 < planned.rule.min_time_s < planned.rule.timeout_s
    assert planned.rule.min_samples == PLANNED_METHOD.rule.min_samples


def test_short_budget_has_fewer_rounds() -> None:
    assert [plan_within(PLANNED_METHOD, share_s, 1).rounds for share_s in (0.5, 2.5, 60.0)] == [
        1,
        2,
        5,
    ]


def test_variable_that_synchronizes_launches_disables_blocking_kernel() -> None:
    assert not plan_method(PLANNED_METHOD, None, 1, {"CUDA_LAUNCH_BLOCKING": "1"}).blocker
    assert plan_method(PLANNED_METHOD, None, 1, {"CUDA_LAUNCH_BLOCKING": "0"}).blocker


def test_no_case_begins_after_twice_the_budget() -> None:
    cases = tuple(Case(Copy(), PLANNED_METHOD) for _ in range(4))
    times_s = iter([0.0, 0.0, 1.0, 7.0])

    shares = list(share_budget(LaunchSpec(budget_s=3.0), cases, lambda: next(times_s)))

    assert shares == [(cases[0], 0.75), (cases[1], pytest.approx(2 / 3))]


def test_first_case_begins_after_any_time() -> None:
    cases = (Case(Copy(), PLANNED_METHOD),)
    times_s = iter([0.0, 100.0])

    assert len(list(share_budget(LaunchSpec(budget_s=1.0), cases, lambda: next(times_s)))) == 1
