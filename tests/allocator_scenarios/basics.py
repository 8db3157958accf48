"""Scenarios 1 to 12: blocks, segments, statistics."""

from __future__ import annotations

import random

from allocator_scenarios.scenario import FREE, LIVE, MIB, Check, Scenario, Steps, Subject, scenario


@scenario(1, "one byte")
def one_byte(subject: Subject) -> Steps:
    expected_changes = {
        "allocation": 1,
        "allocated_bytes": 512,
        "active": 1,
        "active_bytes": 512,
        "requested_bytes": 1,
        "inactive_split": 1,
        "inactive_split_bytes": 2 * MIB - 512,
    }
    kept = {"segment.small_pool": 1, "reserved_bytes": 2 * MIB}
    ptr = subject.alloc(1)
    yield Check("allocated", expected_changes | kept, blocks=[[(512, LIVE), (2 * MIB - 512, FREE)]])
    subject.free(ptr)
    yield Check(
        "freed",
        {name: -change for name, change in expected_changes.items()} | dict.fromkeys(kept, 0),
        blocks=[[(2 * MIB, FREE)]],
    )


@scenario(2, "zero bytes, and invalid frees")
def zero_bytes(subject: Subject) -> Steps:
    empty_ptr = subject.alloc(0)
    subject.free(0)
    yield Check(
        "nothing",
        dict.fromkeys(("allocation", "segment"), 0),
        facts={"null pointer": empty_ptr == 0},
    )
    ptr = subject.alloc(512, raw=True)
    subject.free(ptr)
    facts = {
        "unknown pointer": subject.rejects_free(12345),
        "freed twice": subject.rejects_free(ptr),
    }
    yield Check("refused", {"allocation": 0}, facts=facts)


@scenario(3, "empty_cache releases segments")
def cache_emptied(subject: Subject) -> Steps:
    statistics_before = subject.statistics()
    ptr = subject.alloc(1024)
    yield Check("allocated", {"active_bytes": 1024})
    subject.free(ptr)
    subject.empty_cache()
    yield Check("emptied", {"active_bytes": -1024}, now={"active_bytes.all.freed": 1024}, blocks=[])
    subject.reset_peaks()
    peak_names = [name for name in statistics_before if name.endswith(".peak")]
    statistics_now = subject.statistics()
    yield Check(
        "reset",
        facts={
            "peaks are reset": all(
                statistics_now[peak] == statistics_before[peak] for peak in peak_names
            )
        },
    )


SEGMENT_MIB_BY_SIZE = {
    1: 2,
    512: 2,
    513: 2,
    MIB: 2,
    MIB + 512: 20,
    10 * MIB - 512: 20,
    10 * MIB: 10,
    10 * MIB + 512: 12,
    84 * MIB: 84,
    100 * MIB + 1: 102,
}


@scenario(4, "sizes of segments")
def segment_sizes(subject: Subject) -> Steps:
    for number, (size, segment_mib) in enumerate(SEGMENT_MIB_BY_SIZE.items()):
        kind = "small_pool" if number < 4 else "large_pool"
        ptr = subject.alloc(size)
        yield Check(f"{size}", {"reserved_bytes": segment_mib * MIB, f"segment.{kind}": 1})
        subject.free(ptr)
        subject.empty_cache()
        yield Check(f"{size} emptied", {"reserved_bytes": -segment_mib * MIB})


@scenario(5, "two blocks of 1 MiB in a segment")
def two_blocks_of_one_mib(subject: Subject) -> Steps:
    for number, new_segments in enumerate((1, 0, 1)):
        subject.alloc(MIB)
        yield Check(f"{number}", {"segment": new_segments, "segment.small_pool": new_segments})


@scenario(6, "remainder of a large block")
def large_block_remainder(subject: Subject) -> Steps:
    subject.free(subject.alloc(9 * MIB))
    yield Check("freed", {"segment": 1}, blocks=[[(20 * MIB, FREE)]])
    ptr = subject.alloc(19 * MIB)
    expected_changes = {
        "allocated_bytes": 20 * MIB,
        "requested_bytes": 19 * MIB,
        "inactive_split": 0,
    }
    yield Check("served whole", expected_changes, blocks=[[(20 * MIB, LIVE)]])
    subject.free(ptr)
    subject.alloc(19 * MIB - 512)
    expected_changes = {"allocated_bytes": -MIB - 512, "inactive_split_bytes": MIB + 512}
    yield Check("split", expected_changes, blocks=[[(19 * MIB - 512, LIVE), (MIB + 512, FREE)]])


@scenario(7, "adjacent free blocks are merged")
def free_blocks_merged(subject: Subject) -> Steps:
    a, b, c = (subject.alloc(512) for _ in range(3))
    for label, ptr, pieces, size in (
        ("middle", b, 2, 2 * MIB - 1024),
        ("low", a, 2, 2 * MIB - 512),
        ("high", c, 0, 0),
    ):
        subject.free(ptr)
        now = {"inactive_split.all.current": pieces, "inactive_split_bytes.all.current": size}
        yield Check(label, now=now)


def blocks_left_of_eleven(kept: tuple[int, ...], layout: list[tuple[int, str]]) -> Scenario:
    @scenario(7, f"of eleven blocks, {' and '.join(map(str, kept))} stay")
    def steps(subject: Subject) -> Steps:
        ptrs = [subject.alloc(512) for _ in range(11)]
        for number, ptr in enumerate(ptrs):
            if number not in kept:
                subject.free(ptr)
        yield Check("kept", blocks=[layout])

    return steps


@scenario(8, "best fit")
def best_fit(subject: Subject) -> Steps:
    ptrs = [subject.alloc(size) for size in (1024, 512, 1024, 512, 2048, 512)]
    low_ptr, high_ptr, large_ptr = ptrs[0], ptrs[2], ptrs[4]
    for ptr in (high_ptr, large_ptr, low_ptr):
        subject.free(ptr)
    yield Check("freed", {"inactive_split": 4})
    facts = {
        "lowest address": subject.alloc(1024) == low_ptr,
        "larger block is split": subject.alloc(1500) == large_ptr,
    }
    yield Check("allocated", {"inactive_split": -1}, facts=facts)


@scenario(9, "peaks and totals are reset")
def peaks_reset(subject: Subject) -> Steps:
    subject.free(subject.alloc(MIB))
    small_ptr = subject.alloc(512)
    name = "allocated_bytes.all"
    yield Check("peak", now={f"{name}.peak": MIB, f"{name}.current": 512, f"{name}.freed": MIB})
    subject.reset_peaks()
    yield Check("peaks reset", now={f"{name}.peak": 512})
    subject.reset_sums()
    yield Check(
        "totals reset", now={f"{name}.allocated": 0, f"{name}.freed": 0, f"{name}.current": 512}
    )
    subject.free(small_ptr)
    yield Check("freed", now={f"{name}.allocated": 0, f"{name}.freed": 512})


@scenario(10, "tensors of growing shapes")
def growing_tensors(subject: Subject) -> Steps:
    live = [subject.alloc(4 * elements) for elements in (1, 10 * 20, 200 * 300 * 2000)]
    yield Check("three", {"allocation": 3})
    for i in range(1, 18):
        live.append(subject.alloc(4 * i * 4 * i))
        if i % 2 == 0:
            subject.reset_peaks()
    yield Check("pairs", {"allocation": 17})
    for i in range(5, 22):
        live.append(subject.alloc(4 * i * 7 * i * 9 * i * 11 * i))
        if i % 2 == 0:
            subject.reset_peaks()
        yield Check(f"fours {i}", {"allocation": 1})
    subject.alloc(0)
    random.Random(5).shuffle(live)
    half, live = live[: len(live) // 2], live[len(live) // 2 :]
    for ptr in half:
        subject.free(ptr)
    yield Check("half", {"allocation": -len(half)})
    live += [subject.alloc(4 * i * 3 * i * 8 * i) for i in range(2, 25)]
    yield Check("threes", {"allocation": 23})
    for ptr in live:
        subject.free(ptr)
    yield Check("none", {"allocation": -len(live)}, now={"allocated_bytes.all.current": 0})
    subject.empty_cache()
    yield Check("emptied", {"num_sync_all_streams": 1, "num_device_alloc": 0})


@scenario(11, "10,000 random operations")
def random_operations(subject: Subject) -> Steps:
    rng = random.Random(123)
    live: dict[int, int] = {}
    disjoint = True
    for step in range(10_000):
        match rng.choices(("alloc", "free", "empty"), (1, 1, 0.1))[0]:
            case "alloc" if sum(live.values()) < 100 * MIB:
                size = rng.randint(2 * MIB, 20 * MIB)
                ptr = subject.alloc(size)
                disjoint &= all(
                    ptr + size <= p or p + bytes_of_p <= ptr for p, bytes_of_p in live.items()
                )
                live[ptr] = size
            case "free" if live:
                ptr = rng.choice(list(live))
                del live[ptr]
                subject.free(ptr)
            case "empty":
                subject.empty_cache()
        if step % 1000 == 999:
            now = {"requested_bytes.all.current": sum(live.values())}
            yield Check(f"{step + 1}", now=now, facts={"blocks are disjoint": disjoint})


@scenario(12, "without caching")
def caching_disabled(subject: Subject) -> Steps:
    subject.enable_caching(enabled=False)
    ptr = subject.alloc(MIB, raw=True)
    subject.free(ptr)
    subject.enable_caching(enabled=True)
    yield Check("off", now={"requested_bytes.all.allocated": 0, "num_device_alloc": 0})
    subject.alloc(MIB, raw=True)
    yield Check("on", now={"requested_bytes.all.allocated": MIB})


BASICS = (
    one_byte,
    zero_bytes,
    cache_emptied,
    segment_sizes,
    two_blocks_of_one_mib,
    large_block_remainder,
    free_blocks_merged,
    blocks_left_of_eleven((5,), [(2560, FREE), (512, LIVE), (2 * MIB - 3072, FREE)]),
    blocks_left_of_eleven(
        (5, 8), [(2560, FREE), (512, LIVE), (1024, FREE), (512, LIVE), (2 * MIB - 4608, FREE)]
    ),
    blocks_left_of_eleven((5, 6), [(2560, FREE), (512, LIVE), (512, LIVE), (2 * MIB - 3584, FREE)]),
    best_fit,
    peaks_reset,
    growing_tensors,
    random_operations,
    caching_disabled,
)
