"""The cause of a failed allocation; a simulated allocator produces each one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from memory import builders
from memory.builders import GIB, KIB, MIB, Block, Segment, oom
from memory.simulator import Allocator

from cudakit.memory.analyze import analyze
from cudakit.memory.result import Oom
from cudakit.memory.selection import MemorySpec
from cudakit.memory.snapshot import CUDAKIT_CALLS, BlockState, SegmentKind, Snapshot
from cudakit.memory.verdict import MAX_OOMS
from cudakit.memory.verdict.failure import FailedRequest, obstacle_of
from cudakit.torch_rules.oom import Fit, fit_of

BASE = 0x7F00_0000_0000

Program = Callable[[Allocator], None]


def ooms(snapshot: Snapshot, **spec: object) -> tuple[Oom, ...]:
    return analyze([snapshot], MemorySpec(**spec)).devices[0].ooms  # type: ignore[arg-type]


def failed(program: Program, **options: object) -> Oom:
    """Run a program that runs out of memory once; the device has 64 MiB by default."""
    allocator = Allocator(**({"capacity": 64 * MIB} | options))  # type: ignore[arg-type]
    program(allocator)
    (found,) = ooms(allocator.history().snapshot())
    return found


def allocated(allocator: Allocator, *sizes: int, **more: int) -> list[int]:
    found = [allocator.alloc(size, **more) for size in sizes]
    assert None not in found
    return [address for address in found if address is not None]


# One program for each verdict.


def fills_the_device(allocator: Allocator) -> None:
    allocated(allocator, 50 * MIB)
    allocator.alloc(30 * MIB, stack=1)


def leaves_free_blocks(allocator: Allocator) -> None:
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


def frees_too_late(allocator: Allocator) -> None:
    first, _ = halves_a_segment(allocator)
    allocator.record_stream(first, 1)
    allocator.free(first)
    allocator.alloc(28 * MIB)


def has_free_memory_on_another_stream(allocator: Allocator) -> None:
    first, _ = halves_a_segment(allocator, stream=1)
    allocator.free(first)
    allocator.alloc(30 * MIB)


def has_free_memory_in_several_pools(allocator: Allocator) -> None:
    first, _ = halves_a_segment(allocator, pool=1)
    allocator.free(first)
    allocator.alloc(32 * MIB)


@pytest.mark.parametrize(
    ("verdict", "program", "options"),
    [
        ("capacity", fills_the_device, {}),
        ("capacity", fills_the_device, {"expandable": True}),
        ("limit", fills_the_device, {"capacity": GIB, "limit": 64 * MIB}),
        ("fragmentation", leaves_free_blocks, {}),
        ("fragmentation", leaves_free_blocks, {"capacity": GIB, "limit": 64 * MIB}),
        ("cache", caches_in_a_private_pool, {}),
        ("cache", captures_with_a_full_cache, {}),
        ("cache", captures_with_a_full_cache, {"capacity": GIB, "limit": 64 * MIB}),
        ("pending", waits_for_another_stream, {}),
        ("pending", frees_too_late, {}),
        ("pool", has_free_memory_on_another_stream, {}),
        ("pool", has_free_memory_in_several_pools, {}),
    ],
)
def test_verdict_names_the_cause(
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
            "Allocating 30.0 MiB failed: the program needs this memory: 50.0 MiB was in use, 0 B was free in "
            "segments and 14.0 MiB on the device, 16.0 MiB less than needed; no growth from step to step "
            "and no single phase explains it.",
        ),
        (
            leaves_free_blocks,
            "Allocating 30.0 MiB failed: 54.0 MiB is free in the segments that can serve the request, but "
            "the largest free block is 9.00 MiB (fragmentation).",
        ),
        (
            caches_in_a_private_pool,
            "Allocating 30.0 MiB failed: 40.0 MiB is in empty segments that were not released to the "
            "device (cache).",
        ),
        (
            waits_for_another_stream,
            "Allocating 28.0 MiB failed: 30.0 MiB was freed, but other streams may still use it "
            "(pending free).",
        ),
        (
            frees_too_late,
            "Allocating 28.0 MiB failed: a block of 30.0 MiB became free only after the search for a "
            "free block, when other streams had finished with it (pending free).",
        ),
        (
            has_free_memory_on_another_stream,
            "Allocating 30.0 MiB failed: 35.0 MiB is free in segments of other pools, streams or size "
            "classes, which cannot serve the request (pool).",
        ),
        (
            has_free_memory_in_several_pools,
            "Allocating 32.0 MiB failed: 35.0 MiB is free in segments of other pools, streams or size "
            "classes, which cannot serve the request (pool).",
        ),
    ],
)
def test_sentence_states_the_cause_with_sizes(program: Program, sentence: str) -> None:
    assert failed(program).sentence == sentence


def test_sentence_of_a_limited_process_names_the_free_device_memory() -> None:
    limit = {"capacity": GIB, "limit": 64 * MIB}
    assert failed(fills_the_device, **limit).sentence == (
        "Allocating 30.0 MiB failed: a limit of this process refused a new segment of 30.0 MiB: when the "
        "request failed, 50.0 MiB was reserved, and 974 MiB of the device was free."
    )


def test_sentence_names_free_device_memory_if_free_blocks_alone_are_too_small() -> None:
    def program(allocator: Allocator) -> None:
        held = allocated(allocator, *[18 * MIB, 2 * MIB] * 2)
        for address in held[::2]:
            allocator.free(address)
        allocator.alloc(40 * MIB)

    found = failed(program)
    assert found.verdict == "fragmentation"
    assert (
        "36.0 MiB is free in the segments that can serve the request and 24.0 MiB on the device"
        in found.sentence
    )


# Sizes.


def test_shortage_is_the_request_minus_every_free_byte() -> None:
    found = failed(fills_the_device)
    assert found.size_bytes == 30 * MIB
    assert found.device_free_bytes == 14 * MIB
    assert found.short_bytes == 16 * MIB
    assert found.free_bytes == found.largest_hole_bytes == 0
    assert found.state.active_bytes == 50 * MIB


def test_shortage_is_zero_if_enough_memory_is_free() -> None:
    assert failed(leaves_free_blocks).short_bytes == 0
    assert failed(has_free_memory_in_several_pools).short_bytes == 0


def test_oom_has_the_state_before_the_failure_and_the_stack_of_the_request() -> None:
    found = failed(fills_the_device)
    assert found.event == 2
    assert found.time_us == builders.START_US + 2
    assert found.stack[found.site].name == "place1"


def test_suggested_limit_includes_the_whole_new_segment_as_a_factor_of_the_fraction() -> None:
    def program(allocator: Allocator) -> None:
        allocated(allocator, 50 * MIB)
        allocator.alloc(2 * MIB)

    (remedy,) = failed(program, capacity=GIB, limit=60 * MIB).remedies
    assert (
        "to at least 1.40 times the present fraction: a limit of 70.0 MiB is needed for the"
        in remedy
    )
    assert (
        "reserved memory and the new segment, and the present limit is at least 50.0 MiB" in remedy
    )


def test_cache_remedy_of_private_pools_is_to_delete_the_pools() -> None:
    (private,) = failed(caches_in_a_private_pool).remedies
    assert "MemPools" in private
    (default,) = failed(captures_with_a_full_cache).remedies
    assert "empty_cache" in default


def test_remedy_without_free_memory_is_to_use_less() -> None:
    (remedy,) = failed(fills_the_device).remedies
    assert remedy.startswith("use at least 16.0 MiB less")


# Facts that files do not record.


def test_request_despite_a_large_free_block_is_assigned_to_the_private_pool_before_torch_2_12() -> (
    None
):
    def program(allocator: Allocator) -> None:
        first, _ = halves_a_segment(allocator)
        allocator.free(first)
        allocated(allocator, 2 * KIB, pool=1)
        allocator.alloc(28 * MIB, pool=1)

    assert failed(program, records_pools=True).verdict == "pool"
    assert failed(program, records_pools=False).verdict == "pool"


def test_expandable_segments_of_unknown_kind_can_serve_any_request() -> None:
    unknown = SegmentKind.UNKNOWN
    final = Segment(BASE, 40 * MIB, kind=unknown, expandable=True)
    trace = builders.trace([oom(45 * MIB, device_free=10 * MIB)], [final])
    (found,) = ooms(builders.snapshot(trace))
    assert found.fit.without_holes


def test_pending_blocks_merge_with_the_free_blocks_on_both_sides() -> None:
    blocks = [
        Block(BASE + 5 * MIB, 10 * MIB, state=BlockState.PENDING_FREE),
        Block(BASE + 18 * MIB, 2 * MIB),
    ]
    for size, fits in ((18 * MIB, True), (18 * MIB + 512, False)):
        trace = builders.trace([oom(size, device_free=0)], [Segment(BASE, 20 * MIB, blocks)])
        (found,) = ooms(builders.snapshot(trace))
        assert found.fit.after_pending_frees == fits


def test_verdict_does_not_depend_on_the_selected_stream_or_pool() -> None:
    allocator = Allocator(capacity=64 * MIB)
    has_free_memory_on_another_stream(allocator)
    snapshot = allocator.history().snapshot()
    whole = ooms(snapshot)
    assert whole[0].verdict == "pool"
    assert ooms(snapshot, stream=0) == ooms(snapshot, stream=1) == whole
    assert ooms(snapshot, pool=(0, 0)) == whole


def test_first_and_latest_of_many_failures_are_explained() -> None:
    entries = [oom(GIB, device_free=0) for _ in range(MAX_OOMS + 50)]
    found = ooms(builders.snapshot(builders.trace(entries)))
    assert [each.event for each in found] == [0, *range(51, MAX_OOMS + 50)]


def test_trace_without_failed_allocations_has_no_ooms() -> None:
    assert ooms(builders.snapshot()) == ()


# --- The obstacle of a failed request: the change that would have let the request succeed ----------

# A request of 30 MiB; 50 of the device's 64 MiB are reserved and in use.
FULL = FailedRequest(
    size_bytes=30 * MIB,
    device_free_bytes=14 * MIB,
    reserved_bytes=50 * MIB,
    active_bytes=50 * MIB,
    free_bytes=0,
    own_free_bytes=0,
    own_largest_bytes=0,
    later_largest_bytes=0,
    other_largest_bytes=0,
    releasable_bytes=0,
    releasable_private_bytes=0,
    pending_bytes=0,
)


def test_fit_of_each_change_needs_exactly_the_missing_bytes() -> None:
    enough = {
        "usable_bytes": 4,
        "releasable_bytes": 8,  # with what is usable: a segment
        "own_free_bytes": 6,  # with what is usable: a block
        "largest_other_bytes": 10,
        "largest_later_bytes": 10,
    }
    sizes = {"block_bytes": 10, "segment_bytes": 12}

    assert fit_of(**sizes, **enough) == Fit(True, True, True, True)
    less = {name: size - 1 for name, size in enough.items()}
    assert fit_of(**sizes, **less) == Fit(False, False, False, False)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, "capacity"),
        ({"device_free_bytes": 40 * MIB}, "limit"),
        ({"releasable_bytes": 16 * MIB}, "cache"),
        ({"later_largest_bytes": 30 * MIB}, "pending"),
        ({"own_free_bytes": 16 * MIB, "free_bytes": 16 * MIB}, "fragmentation"),
        ({"other_largest_bytes": 30 * MIB}, "pool"),
        ({"free_bytes": 16 * MIB}, "pool"),
    ],
)
def test_obstacle_names_the_change_that_helps(changes: dict[str, int], code: str) -> None:
    assert obstacle_of(replace(FULL, **changes)).code == code  # type: ignore[arg-type]


def test_shortage_counts_usable_device_memory() -> None:
    assert FULL.short_bytes == 16 * MIB
    assert replace(FULL, free_bytes=20 * MIB).short_bytes == 0
    limited = replace(FULL, device_free_bytes=40 * MIB)
    assert limited.is_limited
    assert limited.short_bytes == 30 * MIB


def test_obstacle_of_a_limited_process_is_the_change_that_needs_no_limit() -> None:
    found = obstacle_of(replace(FULL, device_free_bytes=40 * MIB, releasable_bytes=30 * MIB))
    assert found.code == "cache"
    assert "30.0 MiB is in empty segments" in found.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"device_free_bytes": 40 * MIB},
        {"releasable_bytes": 16 * MIB},
        {"own_free_bytes": 16 * MIB, "free_bytes": 16 * MIB},
        {"other_largest_bytes": 30 * MIB},
        {"later_largest_bytes": 30 * MIB},
    ],
)
def test_remedies_for_cudakits_allocator_name_no_call_of_pytorch(changes: dict[str, int]) -> None:
    failed = replace(FULL, calls=CUDAKIT_CALLS, **changes)  # type: ignore[arg-type]
    found = obstacle_of(failed)
    assert "torch" not in (found.reason + found.remedy).lower()
