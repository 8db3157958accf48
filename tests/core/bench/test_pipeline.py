from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count

import pytest
from core.bench.workloads import Busy, Copy, PreparedCopy, busy_device

from cudakit.core.bench.case import Case
from cudakit.core.bench.method import Method, Rule
from cudakit.core.bench.pipeline import run
from cudakit.core.bench.roofline import Work
from cudakit.core.bench.spec import LaunchSpec, MemorySpec
from cudakit.errors import InputError, Unsupported
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.run_context import RunContext
from cudakit.gpu.sim import Sim
from cudakit.units import Unavailable

METHOD = Method("isolated", "hot")
SPEC = LaunchSpec()


def case(workload: Copy, work: Work | None = None) -> Case:
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
        result = run(SPEC, gpu, cases=[case(Copy())], run_context=run_context, now_ns=lambda: 42)

    (one,) = result.results
    assert (result.bench, result.time_ns, result.complete) == ("launch", 42, True)
    assert result.simulated
    assert one.verified
    assert one.environment.versions == {"driver": "580"}
    assert one.environment.before is not None
    assert one.environment.after is not None
    assert not isinstance(one.limit, Unavailable)
    assert not isinstance(one.ratio_to_limit, Unavailable)
    assert 0 < one.ratio_to_limit < 1


def test_case_larger_than_memory_is_rejected_before_allocation() -> None:
    with closing(Sim(capacity_bytes=8 << 20)) as gpu:
        with pytest.raises(
            InputError, match="memory operation=copy size_bytes=4194304 needs"
        ) as no:
            run(MemorySpec(sizes_bytes=(1 << 20, 4 << 20)), gpu)
        assert gpu.memory_info().free_bytes == 8 << 20

    assert "would fit" in no.value.hint


def test_wrong_case_has_no_figures_and_other_cases_keep_theirs() -> None:
    with closing(Sim()) as gpu:
        result = run(SPEC, gpu, cases=[case(Copy(spoiled=(0, 0))), case(Copy())])

    wrong, right = result.results
    assert isinstance(wrong.median_s, Unavailable)
    assert "1 words are wrong" in wrong.median_s.reason
    assert right.verified
    assert result.complete


def test_interrupt_returns_cases_measured_so_far() -> None:
    endless = LaunchSpec(rule=Rule(min_samples=10**6, timeout_s=1e9))
    cases = [
        case(Copy()),
        Case(
            Copy(before_each=interrupting_after(20)),
            endless.method("isolated", "hot"),
            Work(),
            0,
            0,
        ),
        case(Copy()),
    ]
    with closing(Sim()) as gpu:
        result = run(SPEC, gpu, cases=cases)

    assert [len(one.samples_s) > 1 for one in result.results] == [True, True]
    assert not result.complete
    assert not result.results[1].converged


def test_interrupt_before_first_sample_of_case_keeps_earlier_cases() -> None:
    cases = [case(Copy()), case(Copy(before_each=interrupting_after(2)))]
    with closing(Sim()) as gpu:
        result = run(SPEC, gpu, cases=cases)

    assert len(result.results) == 1
    assert not result.complete


def test_interrupt_before_any_sample_propagates() -> None:
    with closing(Sim()) as gpu, pytest.raises(KeyboardInterrupt):
        run(SPEC, gpu, cases=[case(Copy(before_each=interrupting_after(0)))])


def test_progress_covers_all_cases() -> None:
    told: list[float] = []
    with closing(busy_device([40_000_000])) as gpu:
        rule = Rule(min_samples=10, min_time_s=0)
        cases = [Case(Busy(gpu), Method("isolated", "hot", rule=rule)) for _ in range(3)]
        run(SPEC, gpu, lambda _, fraction: told.append(fraction), cases=cases)

    assert told == sorted(told)
    assert told[0] < 1 / 3
    assert 2 / 3 < told[-1] <= 1


def test_warning_of_several_cases_appears_once() -> None:
    run_context = RunContext(other_processes=2, variables={"CUDA_LAUNCH_BLOCKING": "1"})
    with closing(Sim()) as gpu:
        result = run(SPEC, gpu, cases=[case(Copy()), case(Copy())], run_context=run_context)

    assert len([line for line in result.warnings if "2 other processes" in line]) == 1
    assert not any(one.method.blocker for one in result.results)


@pytest.mark.parametrize(
    ("hot_cases", "which"),
    [(0, ""), (1, " (2 cases, first copy size_bytes=6291456)")],
)
def test_deviation_of_some_cases_names_the_first(hot_cases: int, which: str) -> None:
    rotated = Method("isolated", "rotate")
    cases = [Case(Copy(size_bytes=size << 20), rotated) for size in (6, 8)]
    hot = [Case(Copy(size_bytes=1 << 20), METHOD)] * hot_cases
    with closing(Sim(capacity_bytes=40 << 20)) as gpu:
        result = run(SPEC, gpu, cases=[*cases, *hot])

    assert result.warnings == (
        f"L2 is not cold: the buffer sets are too small to overwrite the cache{which}",
    )


def test_budget_is_shared_among_cases() -> None:
    unlike = (10_000_000 * (1 + n * 7 % 10) for n in count())
    with closing(busy_device(unlike)) as gpu:
        rule = Rule(precision=1e-9)
        cases = [Case(Busy(gpu), Method("isolated", "hot", rule=rule)) for _ in range(4)]
        result = run(LaunchSpec(budget_s=4.0), gpu, cases=cases)
        took_s = gpu.clock.now_ns / 1e9

    assert 3.5 < took_s < 5.0
    assert len(result.results) == 4
    assert not any(one.converged for one in result.results)


@dataclass
class ByAnother(Copy):
    """The same copy by another library, which may not support it."""

    library: str = "other"
    offered: bool = True

    def prepare(self, gpu: Gpu, seed: int) -> PreparedCopy:
        if not self.offered:
            raise Unsupported(f"{self.library} copies nothing", hint="use another")
        return super().prepare(gpu, seed)


def against(*baselines: ByAnother, workload: Copy | None = None) -> Case:
    return replace(case(workload or Copy()), baselines=baselines, settings={"asked": "much"})


def test_baselines_are_interleaved_and_have_own_results() -> None:
    with closing(Sim()) as gpu:
        result = run(SPEC, gpu, cases=[against(ByAnother(), ByAnother(library="third"))])

    assert [one.library for one in result.results] == ["cudakit", "other", "third"]
    assert {one.name for one in result.results} == {"copy"}
    assert {one.method.interleaved for one in result.results} == {("cudakit", "other", "third")}
    assert [one.settings for one in result.results] == [
        {"asked": "much"},
        {"asked": "much", "library": "other"},
        {"asked": "much", "library": "third"},
    ]
    assert all(one.verified for one in result.results)


def test_baseline_with_wrong_values_has_no_figures_and_ours_stay() -> None:
    with closing(Sim()) as gpu:
        own, baseline = run(SPEC, gpu, cases=[against(ByAnother(spoiled=(0, 0)))]).results

    assert own.verified
    assert isinstance(baseline.median_s, Unavailable)
    assert "1 words are wrong" in baseline.median_s.reason


def test_unsupported_baseline_has_reason() -> None:
    with closing(Sim()) as gpu:
        baselines = (ByAnother(offered=False), ByAnother(library="third"))
        own, unable, able = run(SPEC, gpu, cases=[against(*baselines)]).results

    assert unable.median_s == unable.verification == Unavailable("other copies nothing")
    assert unable.method.mode == "isolated"
    assert own.method.interleaved == able.method.interleaved == ("cudakit", "third")


def test_baselines_are_measured_if_own_workload_is_unsupported() -> None:
    with closing(Sim()) as gpu:
        unable = ByAnother(library="ours", offered=False)
        own, baseline = run(SPEC, gpu, cases=[against(ByAnother(), workload=unable)]).results

    assert own.library == "cudakit"
    assert isinstance(own.median_s, Unavailable)
    assert baseline.verified
    assert baseline.method.interleaved == ()


def test_unsupported_is_raised_if_no_library_supports_case() -> None:
    unable = ByAnother(library="ours", offered=False)
    with closing(Sim()) as gpu, pytest.raises(Unsupported, match="ours copies nothing"):
        run(SPEC, gpu, cases=[against(ByAnother(offered=False), workload=unable)])


def test_budget_covers_interleaved_baselines() -> None:
    unlike = (10_000_000 * (1 + n * 7 % 10) for n in count())
    with closing(busy_device(unlike)) as gpu:
        rule = Rule(precision=1e-9)
        cases = [
            Case(Busy(gpu), Method("isolated", "hot", rule=rule), baselines=(BusyBaseline(gpu),))
            for _ in range(2)
        ]
        run(LaunchSpec(budget_s=4.0), gpu, cases=cases)
        took_s = gpu.clock.now_ns / 1e9

    assert 3.5 < took_s < 5.0


@dataclass
class BusyBaseline(Busy):
    library: str = "other"
