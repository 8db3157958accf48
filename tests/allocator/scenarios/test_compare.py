"""compare_subjects reports each difference between two subjects, and nothing for equal subjects."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from allocator_scenarios.canonical import BY_POOL, Names, canonical, sort_by_segment
from allocator_scenarios.compare import compare_subjects, differences, run
from allocator_scenarios.cudakit_subject import CudakitSubject, in_memory
from allocator_scenarios.pools import mixed_checkpoint
from allocator_scenarios.random_run import EXPANDABLE, random_run
from allocator_scenarios.scenario import MIB, CannotRun, Check, Steps, Subject, full_name, scenario

from cudakit.allocator.memory import PoolState
from cudakit.allocator.pools import MemPool

SHORT = random_run(1, 9, steps=1500)


class Older(CudakitSubject):
    """A subject that does not count the reserved bytes of each private pool."""

    def statistics(self) -> dict[str, int]:
        result = super().statistics()
        return {name: n for name, n in result.items() if not name.startswith(BY_POOL)}


class LaterNumbers(CudakitSubject):
    """A subject whose statistics contain pools from before the scenario."""

    def begin(self, settings: str) -> None:
        super().begin(settings)
        for _ in range(3):
            with MemPool(self.allocator) as pool, self.allocator.use_pool(pool):
                self.allocator.free(self.allocator.alloc(30 * MIB))
        self.reset_peaks()
        self.reset_sums()
        self.record_history(clear=True)


class Unreleased(CudakitSubject):
    """A subject that counts the bytes that pools reserve, but not those that pools release."""

    def statistics(self) -> dict[str, int]:
        result = super().statistics()
        return result | {name: 0 for name in result if name.startswith(BY_POOL) and "freed" in name}


def falling() -> CudakitSubject:
    return in_memory(rising=False)


class Generous(CudakitSubject):
    """A subject that allocates 512 bytes more than requested."""

    def alloc(self, size_bytes: int, *args: Any, **more: Any) -> int:
        return super().alloc(size_bytes + 512, *args, **more)


class Forgetful(CudakitSubject):
    """A subject that ignores record_stream."""

    def record_use(self, ptr: int, stream: str) -> None:
        pass


class Failing(CudakitSubject):
    def empty_cache(self) -> None:
        raise RuntimeError("no cache to empty")


class Backwards(CudakitSubject):
    """A subject that splits the last segment of a restored pool first."""

    def restore_pool(self, graph: int, state: PoolState, stale: Collection[int]) -> Collection[int]:
        return super().restore_pool(graph, replace(state, segments=state.segments[::-1]), stale)


class Twice(CudakitSubject):
    """A subject that restores each pool twice."""

    def restore_pool(self, graph: int, state: PoolState, stale: Collection[int]) -> Collection[int]:
        self.allocator.restore(state)
        return super().restore_pool(graph, state, stale)


def changed(kind: type[CudakitSubject], *, rising: bool = True) -> CudakitSubject:
    correct_subject = in_memory(rising=rising)
    return kind(correct_subject._upstream, correct_subject._work)


@scenario(1, "a use of another stream")
def another_stream(subject: Subject) -> Steps:
    ptr = subject.alloc(3 * MIB)
    subject.keep_busy("s1")
    subject.record_use(ptr, "s1")
    subject.free(ptr)
    yield Check("freed")
    subject.alloc(2 * MIB)
    yield Check("allocated")


@scenario(1, "two caches")
def two_caches(subject: Subject) -> Steps:
    """Use two segments of equal size; their addresses determine which one serves a request."""
    blocks = [subject.alloc(30 * MIB) for _ in range(3)]
    subject.free(blocks[2])
    subject.free(blocks[0])
    subject.alloc(30 * MIB)
    yield Check("one of them")


@scenario(1, "two pools")
def two_pools(subject: Subject) -> Steps:
    for _ in range(2):
        with subject.use_pool(subject.make_pool()):
            subject.free(subject.alloc(3 * MIB))
    subject.close_pool(1)
    yield Check("one is gone")


def test_two_equal_runs_compare_equal() -> None:
    verdict = compare_subjects(SHORT, in_memory, in_memory())

    assert (verdict.problems, verdict.at_torch_addresses, verdict.summary) == ((), False, "equal")
    assert verdict.checks == 4


def test_order_of_addresses_is_ignored() -> None:
    found_differences = list(differences(run(two_caches, in_memory()), run(two_caches, falling())))
    verdict = compare_subjects(two_caches, in_memory, falling())

    assert found_differences != []
    assert (verdict.problems, verdict.at_torch_addresses) == ((), True)


@pytest.mark.parametrize("settings", [(), EXPANDABLE])
def test_long_run_compares_equal_at_equal_addresses(settings: tuple[str, ...]) -> None:
    run = random_run(1, 9, steps=3000, settings=settings)

    assert compare_subjects(run, in_memory, falling()).problems == ()


@pytest.mark.parametrize("kind", [CudakitSubject, Backwards])
@pytest.mark.parametrize("rising", [True, False])
def test_order_of_restored_segments_is_ignored(kind: type[CudakitSubject], rising: bool) -> None:
    other_subject = changed(kind, rising=rising)

    verdict = compare_subjects(mixed_checkpoint, in_memory, other_subject)

    assert (verdict.problems, verdict.at_torch_addresses) == ((), False)


def test_difference_of_a_restored_pool_is_reported() -> None:
    verdict = compare_subjects(mixed_checkpoint, in_memory, changed(Twice))

    assert any(problem.startswith("restored: trace") for problem in verdict.problems)


@pytest.mark.parametrize("kind", [Older, LaterNumbers])
def test_reserved_bytes_of_pools_are_compared_if_both_subjects_report_them(
    kind: type[CudakitSubject],
) -> None:
    found_differences = list(
        differences(run(two_pools, in_memory()), run(two_pools, changed(kind)))
    )

    assert found_differences == []


def test_difference_of_reserved_bytes_of_a_pool_is_reported() -> None:
    found_differences = list(
        differences(run(two_pools, in_memory()), run(two_pools, changed(Unreleased)))
    )

    assert len(found_differences) == 2
    assert (
        "reserved_bytes_by_private_pools.pool 1.all.freed: 20,971,520, PyTorch 0"
        in found_differences[0]
    )


def test_difference_of_sizes_is_reported_with_both_values() -> None:
    verdict = compare_subjects(another_stream, in_memory, changed(Generous))

    assert (
        "freed: statistic active_bytes.all.allocated: 3,145,728, PyTorch 3,146,240"
        in verdict.problems
    )
    assert any("segment 0 block 0 requested_size" in problem for problem in verdict.problems)
    assert any("trace 1 size" in problem for problem in verdict.problems)


def test_difference_of_block_states_is_reported() -> None:
    verdict = compare_subjects(another_stream, in_memory, changed(Forgetful))

    assert (
        "freed: segment 0 block 0 state: active_pending_free, PyTorch inactive" in verdict.problems
    )
    assert any("trace" in problem for problem in verdict.problems)


def test_further_differences_are_counted() -> None:
    verdict = compare_subjects(SHORT, in_memory, changed(Generous))

    assert any(problem.endswith("more") for problem in verdict.problems)


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (Check("a", {"segment": 2}), "segment.all.current changed by 1, not by 2"),
        (Check("a", now={"num_ooms": 7}), "num_ooms is 0, not 7"),
        (Check("a", blocks=[]), "not []"),
        (Check("a", facts={"so": False}), "it does not hold: so"),
    ],
)
def test_unexpected_value_is_reported(check: Check, words: str) -> None:
    @scenario(1, "wrong")
    def wrong_scenario(subject: Subject) -> Steps:
        subject.alloc(1)
        yield check

    (step,) = run(wrong_scenario, in_memory())

    assert len(step.failures) == 1
    assert words in step.failures[0]
    assert compare_subjects(wrong_scenario, in_memory, None).problems == (
        f"a: cudakit is not as expected: {step.failures[0]}",
    )


def test_scenario_that_pytorch_cannot_run_has_a_reason_and_still_runs_on_cudakit() -> None:
    class Without(CudakitSubject):
        def keep_busy(self, stream: str) -> None:
            raise CannotRun(f"there is no stream {stream}")

    verdict = compare_subjects(another_stream, in_memory, changed(Without))

    assert verdict.problems == ()
    assert verdict.summary == "as expected, not compared: there is no stream s1"


def test_exception_of_a_subject_is_reported_as_a_problem() -> None:
    @scenario(1, "emptied")
    def emptied(subject: Subject) -> Steps:
        subject.empty_cache()
        yield Check("emptied")

    subject_fails = compare_subjects(emptied, in_memory, changed(Failing))
    reference_fails = compare_subjects(emptied, lambda _: changed(Failing), None)

    assert subject_fails.problems == ("PyTorch failed: RuntimeError: no cache to empty",)
    assert reference_fails.problems == ("cudakit failed: RuntimeError: no cache to empty",)


def test_reused_subject_is_reset() -> None:
    subject = in_memory()
    first = run(another_stream, subject)

    assert list(differences(run(another_stream, subject), first)) == []


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("segment", "segment.all.current"),
        ("segment.small_pool", "segment.small_pool.current"),
        ("segment.all.peak", "segment.all.peak"),
        ("oversize_segments", "oversize_segments.current"),
        ("oversize_segments.peak", "oversize_segments.peak"),
        ("num_ooms", "num_ooms"),
    ],
)
def test_short_statistic_names_are_expanded(short: str, full: str) -> None:
    assert full_name(short) == full


def entry(action: str, addr: int, size: int, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream, "pool_id": (0, 0)}


def places(*entries: dict[str, Any]) -> list[tuple[str, int]]:
    snapshot = {"segments": [], "device_traces": [list(entries)], "allocator_settings": {}}
    snapshot_names = canonical(snapshot, Names({7: "s1"}, {}, 100 * MIB))
    return [entry["at"] for entry in snapshot_names.trace]


def test_canonical_address_is_a_segment_name_and_an_offset() -> None:
    assert places(
        entry("segment_alloc", 4 * MIB, 2 * MIB),
        entry("alloc", 4 * MIB + 512, 512),
        entry("segment_free", 4 * MIB, 2 * MIB),
        entry("segment_alloc", 4 * MIB, 2 * MIB),
        entry("alloc", 9 * MIB, 512),
    ) == [("segment 0", 0), ("segment 0", 512), ("segment 0", 0), ("segment 1", 0), ("?", MIB)]


def test_later_mapping_belongs_to_the_same_reservation() -> None:
    assert places(
        entry("segment_map", 400 * MIB, 2 * MIB),
        entry("segment_alloc", 16 * MIB, 2 * MIB),
        entry("segment_map", 402 * MIB, 2 * MIB),
        entry("segment_unmap", 400 * MIB, 2 * MIB),
        entry("segment_map", 500 * MIB, 2 * MIB),
        entry("segment_unmap", 402 * MIB, 2 * MIB),
        entry("segment_map", 402 * MIB, 2 * MIB),
    ) == [
        ("reservation 0", 0),
        ("segment 1", 0),
        ("reservation 0", 2 * MIB),
        ("reservation 0", 0),
        ("reservation 2", 0),
        ("reservation 0", 2 * MIB),
        ("reservation 3", 0),
    ]


def test_order_of_frees_completed_together_is_ignored() -> None:
    begin = entry("segment_alloc", 4 * MIB, 2 * MIB)
    low, high = entry("free_completed", 4 * MIB, 512), entry("free_completed", 5 * MIB, 512)

    assert places(begin, low, high) == places(begin, high, low)


def restored(*actions_and_segments: tuple[str, int]) -> list[dict[str, Any]]:
    """Return the compared form of trace entries, given an action and a segment for each."""
    entries = [
        {"action": action, "at": (f"segment {number}", 0)}
        for action, number in actions_and_segments
    ]
    return sort_by_segment(entries)


FREED = ("free_requested", 0), ("free_requested", 1)
DIVIDED = ("alloc", 0), ("free_requested", 0), ("alloc", 1)


@pytest.mark.parametrize(
    ("actions_and_segments", "is_equal"),
    [
        ((*FREED[::-1], *DIVIDED), True),
        ((*FREED, DIVIDED[2], *DIVIDED[:2]), True),
        ((*FREED, ("free_requested", 0), ("alloc", 0), ("alloc", 1)), False),
        ((FREED[0], *DIVIDED, FREED[1]), False),
        ((*FREED, *DIVIDED[:2]), False),
    ],
)
def test_restore_ignores_only_the_order_of_segments(
    actions_and_segments: tuple[tuple[str, int], ...], is_equal: bool
) -> None:
    assert (restored(*actions_and_segments) == restored(*FREED, *DIVIDED)) is is_equal
