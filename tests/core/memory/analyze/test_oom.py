"""Why an allocation failed: each cause made with the simulated allocator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core.memory import builders
from core.memory.builders import GIB, KIB, MIB, Block, Segment, oom
from core.memory.simulator import Allocator

from cudakit.core.memory.analyze import MemorySpec, analyze
from cudakit.core.memory.analyze.oom import MOST_OOMS
from cudakit.core.memory.result import Oom
from cudakit.core.memory.snapshot import BlockState, SegmentKind, Snapshot

BASE = 0x7F00_0000_0000

Program = Callable[[Allocator], None]


def ooms(snapshot: Snapshot, **spec: object) -> tuple[Oom, ...]:
    return analyze([snapshot], MemorySpec(**spec)).devices[0].ooms  # type: ignore[arg-type]


def failed(program: Program, **options: object) -> Oom:
    """Run a program that runs out of memory once; 64 MiB of device unless told otherwise."""
    allocator = Allocator(**({"capacity": 64 * MIB} | options))  # type: ignore[arg-type]
    program(allocator)
    (found,) = ooms(allocator.history().snapshot())
    return found


def allocated(allocator: Allocator, *sizes: int, **more: int) -> list[int]:
    found = [allocator.alloc(size, **more) for size in sizes]
    assert None not in found
    return [address for address in found if address is not None]


# The programs, by the verdict that they lead to.


def fills_the_device(allocator: Allocator) -> None:
    allocated(allocator, 50 * MIB)
    allocator.alloc(30 * MIB, stack=1)


def leaves_holes(allocator: Allocator) -> None:
    held = allocated(allocator, *[9 * MIB, 2 * MIB, 9 * MIB] * 3)
    for address in (*held[::3], *held[2::3]):
        allocator.free(address)
    allocator.alloc(30 * MIB)


def caches_in_a_private_pool(allocator: Allocator) -> None:
    (address,) = allocated(allocator, 40 * MIB, pool=1)
    allocator.free(address)
    allocator.alloc(30 * MIB)


def captures_with_a_full_cache(allocator: Allocator) -> None:
    (address,) = allocated(allocator, 40 * MIB)
    allocator.free(address)
    allocator.capturing = True
    allocator.alloc(30 * MIB, pool=1)


def halves_a_segment(allocator: Allocator, **more: int) -> tuple[int, int]:
    (whole,) = allocated(allocator, 60 * MIB, **more)
    allocator.free(whole)
    first, second = allocated(allocator, 30 * MIB, 25 * MIB, **more)
    return first, second


def waits_for_another_stream(allocator: Allocator) -> None:
    first, _ = halves_a_segment(allocator)
    allocator.record_stream(first, 1)
    allocator.free(first)
    allocator.capturing = True
    allocator.alloc(28 * MIB)


def gets_memory_back_too_late(allocator: Allocator) -> None:
    first, _ = halves_a_segment(allocator)
    allocator.record_stream(first, 1)
    allocator.free(first)
    allocator.alloc(28 * MIB)


def has_room_on_another_stream(allocator: Allocator) -> None:
    first, _ = halves_a_segment(allocator, stream=1)
    allocator.free(first)
    allocator.alloc(30 * MIB)


def has_room_in_several_pools_together(allocator: Allocator) -> None:
    first, _ = halves_a_segment(allocator, pool=1)
    allocator.free(first)
    allocator.alloc(32 * MIB)


@pytest.mark.parametrize(
    ("verdict", "program", "options"),
    [
        ("capacity", fills_the_device, {}),
        ("capacity", fills_the_device, {"expandable": True}),
        ("limit", fills_the_device, {"capacity": GIB, "limit": 64 * MIB}),
        ("fragmentation", leaves_holes, {}),
        ("fragmentation", leaves_holes, {"capacity": GIB, "limit": 64 * MIB}),
        ("cache", caches_in_a_private_pool, {}),
        ("cache", captures_with_a_full_cache, {}),
        ("cache", captures_with_a_full_cache, {"capacity": GIB, "limit": 64 * MIB}),
        ("pending", waits_for_another_stream, {}),
        ("pending", gets_memory_back_too_late, {}),
        ("pool", has_room_on_another_stream, {}),
        ("pool", has_room_in_several_pools_together, {}),
    ],
)
def test_the_verdict_is_the_cause(
    verdict: str, program: Program, options: dict[str, object]
) -> None:
    found = failed(program, **options)
    assert found.verdict == verdict
    assert found.limited == ("limit" in options)
    assert found.remedies


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (
            fills_the_device,
            "30.0 MiB could not fit: 50.0 MiB were in use, 14.0 MiB free on the device and 0 B in "
            "holes, which is 16.0 MiB too little even with every free byte usable.",
        ),
        (
            leaves_holes,
            "30.0 MiB did not fit, but would have fitted without holes: 54.0 MiB are free inside "
            "reserved segments, but the largest hole is 9.00 MiB.",
        ),
        (
            caches_in_a_private_pool,
            "30.0 MiB did not fit, but would have fitted without the cache: 40.0 MiB lie in empty "
            "segments that were not given back.",
        ),
        (
            waits_for_another_stream,
            "28.0 MiB did not fit, but would have fitted a moment later: 30.0 MiB were freed but "
            "still in use by other streams (record_stream).",
        ),
        (
            gets_memory_back_too_late,
            "28.0 MiB did not fit, but would have fitted a moment later: a hole of 30.0 MiB became "
            "free only after PyTorch had searched, when it waited for the other streams that used "
            "it (record_stream).",
        ),
        (
            has_room_on_another_stream,
            "30.0 MiB did not fit, but would have fitted into another pool or stream: 35.0 MiB are "
            "free where this request may not go.",
        ),
        (
            has_room_in_several_pools_together,
            "32.0 MiB did not fit, but would have fitted if pools and streams shared their memory: "
            "35.0 MiB are free where this request may not go.",
        ),
    ],
)
def test_the_sentence_says_what_was_missing(program: Program, sentence: str) -> None:
    assert failed(program).sentence == sentence


def test_under_a_limit_the_sentence_says_that_the_device_had_room() -> None:
    limit = {"capacity": GIB, "limit": 64 * MIB}
    assert failed(fills_the_device, **limit).sentence == (
        "30.0 MiB met a limit of the process, not of the device: the device had 974 MiB free while "
        "this process held 50.0 MiB."
    )
    assert failed(leaves_holes, **limit).sentence.endswith(
        "; the device had 964 MiB free, so a limit of the process (set_per_process_memory_fraction) "
        "kept it at 60.0 MiB."
    )


def test_free_device_memory_is_named_if_holes_alone_are_too_small() -> None:
    def program(allocator: Allocator) -> None:
        held = allocated(allocator, *[18 * MIB, 2 * MIB] * 2)
        for address in held[::2]:
            allocator.free(address)
        allocator.alloc(40 * MIB)

    found = failed(program)
    assert found.verdict == "fragmentation"
    assert "36.0 MiB are free inside reserved segments and 24.0 MiB on the device" in found.sentence


# The figures.


def test_shortage_is_the_request_minus_every_free_byte() -> None:
    found = failed(fills_the_device)
    assert found.size_bytes == 30 * MIB
    assert found.device_free_bytes == 14 * MIB
    assert found.short_bytes == 16 * MIB
    assert found.free_bytes == found.largest_hole_bytes == 0
    assert found.state.active_bytes == 50 * MIB


def test_an_allocation_that_could_have_fitted_is_short_of_nothing() -> None:
    assert failed(leaves_holes).short_bytes == 0
    assert failed(has_room_in_several_pools_together).short_bytes == 0


def test_the_state_is_that_before_the_failure_and_the_stack_is_the_requests() -> None:
    found = failed(fills_the_device)
    assert found.event == 2
    assert found.time_us == builders.START_US + 2
    assert found.stack[found.site].name == "place1"


def test_the_limit_to_ask_for_has_room_for_the_whole_segment() -> None:
    def program(allocator: Allocator) -> None:
        allocated(allocator, 50 * MIB)
        allocator.alloc(2 * MIB)

    found = failed(program, capacity=GIB, limit=60 * MIB)
    assert "at least 70.0 MiB" in found.remedies[0]


# The remedies.


def test_expandable_segments_are_no_remedy_if_already_in_use() -> None:
    plain, expandable = failed(leaves_holes), failed(leaves_holes, expandable=True)
    assert "expandable_segments:True" in plain.remedies[0]
    assert expandable.verdict == "fragmentation"
    assert not any("expandable_segments" in remedy for remedy in expandable.remedies)


def test_a_limit_on_splitting_is_no_remedy_where_there_is_one() -> None:
    assert any("max_split_size_mb:30" in remedy for remedy in failed(leaves_holes).remedies)
    limited = failed(leaves_holes, max_split=40 * MIB)
    assert not any("max_split_size_mb" in remedy for remedy in limited.remedies)


def test_the_cache_of_private_pools_goes_back_with_the_pools_only() -> None:
    (private,) = failed(caches_in_a_private_pool).remedies
    assert "MemPools" in private
    (default,) = failed(captures_with_a_full_cache).remedies
    assert "empty_cache" in default


def test_without_holes_expandable_segments_do_not_help_a_full_device() -> None:
    (remedy,) = failed(fills_the_device).remedies
    assert remedy.startswith("hold 16.0 MiB less")


# What files leave open.


def test_before_torch_2_12_a_large_enough_hole_means_a_private_pool_was_used() -> None:
    def program(allocator: Allocator) -> None:
        first, _ = halves_a_segment(allocator)
        allocator.free(first)
        allocated(allocator, 2 * KIB, pool=1)
        allocator.alloc(28 * MIB, pool=1)

    assert failed(program, says_pools=True).verdict == "pool"
    assert failed(program, says_pools=False).verdict == "pool"


def test_expandable_segments_of_unknown_kind_count_as_the_requests_own() -> None:
    unknown = SegmentKind.UNKNOWN
    final = Segment(BASE, 40 * MIB, kind=unknown, expandable=True)
    trace = builders.trace([oom(45 * MIB, device_free=10 * MIB)], [final])
    (found,) = ooms(builders.snapshot(trace))
    assert found.fit.without_holes


def test_pending_blocks_join_the_holes_on_both_sides() -> None:
    blocks = [
        Block(BASE + 5 * MIB, 10 * MIB, state=BlockState.PENDING_FREE),
        Block(BASE + 18 * MIB, 2 * MIB),
    ]
    for size, fits in ((18 * MIB, True), (18 * MIB + 512, False)):
        trace = builders.trace([oom(size, device_free=0)], [Segment(BASE, 20 * MIB, blocks)])
        (found,) = ooms(builders.snapshot(trace))
        assert found.fit.after_pending_frees == fits


def test_the_reason_does_not_depend_on_the_stream_or_pool_looked_at() -> None:
    allocator = Allocator(capacity=64 * MIB)
    has_room_on_another_stream(allocator)
    snapshot = allocator.history().snapshot()
    whole = ooms(snapshot)
    assert whole[0].verdict == "pool"
    assert ooms(snapshot, stream=0) == ooms(snapshot, stream=1) == whole
    assert ooms(snapshot, pool=(0, 0)) == whole


def test_of_many_failures_the_first_and_the_latest_are_explained() -> None:
    entries = [oom(GIB, device_free=0) for _ in range(MOST_OOMS + 50)]
    found = ooms(builders.snapshot(builders.trace(entries)))
    assert [each.event for each in found] == [0, *range(51, MOST_OOMS + 50)]


def test_a_trace_in_which_nothing_failed_has_no_failures() -> None:
    assert ooms(builders.snapshot()) == ()
