"""Scenarios 1 to 12: blocks, segments, statistics."""

from __future__ import annotations

import random

from allocator_scenarios.scenario import FREE, LIVE, MIB, Check, Scenario, Steps, Subject, scenario


@scenario(1, "one byte")
def one_byte(s: Subject) -> Steps:
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
    ptr = s.alloc(1)
    yield Check("allocated", expected_changes | kept, blocks=[[(512, LIVE), (2 * MIB - 512, FREE)]])
    s.free(ptr)
    yield Check(
        "freed",
        {name: -change for name, change in expected_changes.items()} | dict.fromkeys(kept, 0),
        blocks=[[(2 * MIB, FREE)]],
    )


@scenario(2, "no bytes, and frees that are refused")
def no_bytes(s: Subject) -> Steps:
    empty_ptr = s.alloc(0)
    s.free(0)
    yield Check(
        "nothing", dict.fromkeys(("allocation", "segment"), 0), facts={"null": empty_ptr == 0}
    )
    ptr = s.alloc(512, raw=True)
    s.free(ptr)
    facts = {"unknown": s.refuses_to_free(12345), "twice": s.refuses_to_free(ptr)}
    yield Check("refused", {"allocation": 0}, facts=facts)


@scenario(3, "an empty cache")
def empty_cache(s: Subject) -> Steps:
    before = s.statistics()
    ptr = s.alloc(1024)
    yield Check("allocated", {"active_bytes": 1024})
    s.free(ptr)
    s.empty_cache()
    yield Check("emptied", {"active_bytes": -1024}, now={"active_bytes.all.freed": 1024}, blocks=[])
    s.reset_peaks()
    peaks = [name for name in before if name.endswith(".peak")]
    statistics_now = s.statistics()
    yield Check(
        "reset", facts={"peaks": all(statistics_now[peak] == before[peak] for peak in peaks)}
    )


SIZES = {
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
def segment_sizes(s: Subject) -> Steps:
    for number, (size, segment) in enumerate(SIZES.items()):
        kind = "small_pool" if number < 4 else "large_pool"
        ptr = s.alloc(size)
        yield Check(f"{size}", {"reserved_bytes": segment * MIB, f"segment.{kind}": 1})
        s.free(ptr)
        s.empty_cache()
        yield Check(f"{size} emptied", {"reserved_bytes": -segment * MIB})


@scenario(5, "two blocks of 1 MiB in a segment")
def two_of_a_mib(s: Subject) -> Steps:
    for number, new in enumerate((1, 0, 1)):
        s.alloc(MIB)
        yield Check(f"{number}", {"segment": new, "segment.small_pool": new})


@scenario(6, "what is split of a large block")
def large_split(s: Subject) -> Steps:
    s.free(s.alloc(9 * MIB))
    yield Check("freed", {"segment": 1}, blocks=[[(20 * MIB, FREE)]])
    ptr = s.alloc(19 * MIB)
    expected_changes = {
        "allocated_bytes": 20 * MIB,
        "requested_bytes": 19 * MIB,
        "inactive_split": 0,
    }
    yield Check("whole", expected_changes, blocks=[[(20 * MIB, LIVE)]])
    s.free(ptr)
    s.alloc(19 * MIB - 512)
    expected_changes = {"allocated_bytes": -MIB - 512, "inactive_split_bytes": MIB + 512}
    yield Check("parted", expected_changes, blocks=[[(19 * MIB - 512, LIVE), (MIB + 512, FREE)]])


@scenario(7, "adjacent free blocks are merged")
def merging(s: Subject) -> Steps:
    a, b, c = (s.alloc(512) for _ in range(3))
    for label, ptr, pieces, size in (
        ("middle", b, 2, 2 * MIB - 1024),
        ("low", a, 2, 2 * MIB - 512),
        ("high", c, 0, 0),
    ):
        s.free(ptr)
        now = {"inactive_split.all.current": pieces, "inactive_split_bytes.all.current": size}
        yield Check(label, now=now)


def kept_of_eleven(kept: tuple[int, ...], layout: list[tuple[int, str]]) -> Scenario:
    @scenario(7, f"of eleven blocks, {' and '.join(map(str, kept))} stay")
    def steps(s: Subject) -> Steps:
        held = [s.alloc(512) for _ in range(11)]
        for number, ptr in enumerate(held):
            if number not in kept:
                s.free(ptr)
        yield Check("kept", blocks=[layout])

    return steps


@scenario(8, "best fit")
def best_fit(s: Subject) -> Steps:
    held = [s.alloc(size) for size in (1024, 512, 1024, 512, 2048, 512)]
    low, high, large = held[0], held[2], held[4]
    for ptr in (high, large, low):
        s.free(ptr)
    yield Check("freed", {"inactive_split": 4})
    facts = {"lowest": s.alloc(1024) == low, "split": s.alloc(1500) == large}
    yield Check("allocated", {"inactive_split": -1}, facts=facts)


@scenario(9, "peaks and sums")
def peaks(s: Subject) -> Steps:
    s.free(s.alloc(MIB))
    small = s.alloc(512)
    name = "allocated_bytes.all"
    yield Check("peak", now={f"{name}.peak": MIB, f"{name}.current": 512, f"{name}.freed": MIB})
    s.reset_peaks()
    yield Check("reset", now={f"{name}.peak": 512})
    s.reset_sums()
    yield Check("anew", now={f"{name}.allocated": 0, f"{name}.freed": 0, f"{name}.current": 512})
    s.free(small)
    yield Check("freed", now={f"{name}.allocated": 0, f"{name}.freed": 512})


@scenario(10, "tensors of growing shapes")
def growing(s: Subject) -> Steps:
    live = [s.alloc(4 * elements) for elements in (1, 10 * 20, 200 * 300 * 2000)]
    yield Check("three", {"allocation": 3})
    for i in range(1, 18):
        live.append(s.alloc(4 * i * 4 * i))
        if i % 2 == 0:
            s.reset_peaks()
    yield Check("pairs", {"allocation": 17})
    for i in range(5, 22):
        live.append(s.alloc(4 * i * 7 * i * 9 * i * 11 * i))
        if i % 2 == 0:
            s.reset_peaks()
        yield Check(f"fours {i}", {"allocation": 1})
    s.alloc(0)
    random.Random(5).shuffle(live)
    half, live = live[: len(live) // 2], live[len(live) // 2 :]
    for ptr in half:
        s.free(ptr)
    yield Check("half", {"allocation": -len(half)})
    live += [s.alloc(4 * i * 3 * i * 8 * i) for i in range(2, 25)]
    yield Check("threes", {"allocation": 23})
    for ptr in live:
        s.free(ptr)
    yield Check("none", {"allocation": -len(live)}, now={"allocated_bytes.all.current": 0})
    s.empty_cache()
    yield Check("emptied", {"num_sync_all_streams": 1, "num_device_alloc": 0})


@scenario(11, "10,000 random operations")
def fuzz(s: Subject) -> Steps:
    rng = random.Random(123)
    live: dict[int, int] = {}
    apart = True
    for step in range(10_000):
        match rng.choices(("alloc", "free", "empty"), (1, 1, 0.1))[0]:
            case "alloc" if sum(live.values()) < 100 * MIB:
                size = rng.randint(2 * MIB, 20 * MIB)
                ptr = s.alloc(size)
                apart &= all(ptr + size <= p or p + own <= ptr for p, own in live.items())
                live[ptr] = size
            case "free" if live:
                ptr = rng.choice(list(live))
                del live[ptr]
                s.free(ptr)
            case "empty":
                s.empty_cache()
        if step % 1000 == 999:
            now = {"requested_bytes.all.current": sum(live.values())}
            yield Check(f"{step + 1}", now=now, facts={"apart": apart})


@scenario(12, "without caching")
def uncached(s: Subject) -> Steps:
    s.caching(enabled=False)
    ptr = s.alloc(MIB, raw=True)
    s.free(ptr)
    s.caching(enabled=True)
    yield Check("off", now={"requested_bytes.all.allocated": 0, "num_device_alloc": 0})
    s.alloc(MIB, raw=True)
    yield Check("on", now={"requested_bytes.all.allocated": MIB})


BASICS = (
    one_byte,
    no_bytes,
    empty_cache,
    segment_sizes,
    two_of_a_mib,
    large_split,
    merging,
    kept_of_eleven((5,), [(2560, FREE), (512, LIVE), (2 * MIB - 3072, FREE)]),
    kept_of_eleven(
        (5, 8), [(2560, FREE), (512, LIVE), (1024, FREE), (512, LIVE), (2 * MIB - 4608, FREE)]
    ),
    kept_of_eleven((5, 6), [(2560, FREE), (512, LIVE), (512, LIVE), (2 * MIB - 3584, FREE)]),
    best_fit,
    peaks,
    growing,
    fuzz,
    uncached,
)
