"""Scenarios 13 to 22: out of memory, and the attempts before."""

from __future__ import annotations

from allocator_scenarios.scenario import (
    FREE,
    GIB,
    LIVE,
    MIB,
    Check,
    Scenario,
    Steps,
    Subject,
    scenario,
)


def limit_to(s: Subject, size_bytes: int) -> None:
    """Limit the reserved bytes, with a margin for rounding of the fraction."""
    s.limit((size_bytes + MIB) / s.total_bytes)


@scenario(13, "beyond the device")
def beyond(s: Subject) -> Steps:
    kept_ptr = s.alloc(MIB)
    words = s.refusal(800_000_000 * GIB)
    said = "Tried to allocate 800000000.00 GiB. GPU 0 has a total capacity of" in words
    yield Check("refused", {"num_ooms": 1, "num_alloc_retries": 1}, facts={"said": said})
    said = "Tried to allocate more than 1EB memory" in s.refusal(8_000_000_000 * GIB)
    yield Check("an EiB", {"num_ooms": 0}, facts={"said": said})
    s.free(kept_ptr)
    yield Check("freed", {"allocation": -1})


@scenario(14, "half of the device, twice")
def halves(s: Subject) -> Steps:
    half = s.total_bytes // 2 + 2 * MIB
    first = s.alloc(half)
    facts = {"refused": "Tried to allocate" in s.refusal(half)}
    yield Check("second", {"num_ooms": 1, "num_alloc_retries": 1}, facts=facts)
    s.free(first)
    s.alloc(half)
    yield Check("again", {"num_ooms": 0}, now={"num_device_alloc": 1})


@scenario(15, "a fraction of the device")
def fraction(s: Subject) -> Steps:
    s.limit(0.5)
    s.free(s.alloc(int(0.499 * s.total_bytes)))
    s.empty_cache()
    yield Check("below", {"num_ooms": 0, "segment": 0})
    words = s.refusal(s.total_bytes // 2 + 2 * MIB)
    yield Check("above", {"num_ooms": 1}, facts={"allowed": " allowed" in words})
    facts = {f"{seen}": s.limit_error(seen) == error for seen, error in WRONG}
    for value in (0.0, 0.25, 1.0):
        s.limit(value)
        facts[f"{value} is read"] = s.fraction() == value
    yield Check("values", facts=facts)


WRONG = ((1, "TypeError"), (-0.1, "ValueError"), (2.0, "ValueError"))


def observed(settings: str) -> Scenario:
    @scenario(16, f"observers, {settings or 'by default'}", settings=settings)
    def steps(s: Subject) -> Steps:
        told: list[int] = []
        s.on_out_of_memory(lambda: told.append(1))
        facts = {"refused": s.refusal(4 << 40) != "", "told once": len(told) == 1}
        yield Check("refused", {"num_ooms": 1}, facts=facts)

    return steps


@scenario(17, "blocks that are not split are given back", settings="max_split_size_mb:40")
def available(s: Subject) -> Steps:
    limit_to(s, 120 * MIB)
    held = [s.alloc(40 * MIB) for _ in range(3)]
    facts = {"refused": s.refusal(40 * MIB) != ""}
    yield Check("fourth", {"num_ooms": 1, "oversize_allocations": 3}, facts=facts)
    for ptr in held:
        s.free(ptr)
    s.alloc(120 * MIB)
    yield Check("all", {"num_sync_all_streams": 0, "num_ooms": 0}, blocks=[[(120 * MIB, LIVE)]])


@scenario(17, "the largest is given back first", settings="max_split_size_mb:40")
def largest_first(s: Subject) -> Steps:
    limit_to(s, 150 * MIB)
    for ptr in [s.alloc(size * MIB) for size in (40, 60, 50)]:
        s.free(ptr)
    s.alloc(100 * MIB)
    yield Check("taken", blocks=[[(40 * MIB, FREE)], [(100 * MIB, LIVE)]])


@scenario(18, "garbage is collected", settings="garbage_collection_threshold:0.5")
def garbage(s: Subject) -> Steps:
    limit_to(s, 120 * MIB)
    for ptr in [s.alloc(40 * MIB) for _ in range(2)]:
        s.free(ptr)
    s.alloc(80 * MIB)
    yield Check("taken", {"num_sync_all_streams": 0}, blocks=[[(80 * MIB, LIVE)]])


@scenario(18, "the oldest garbage goes first", settings="garbage_collection_threshold:0.3")
def oldest_first(s: Subject) -> Steps:
    limit_to(s, 200 * MIB)
    split = [s.alloc(8 * MIB), s.alloc(6 * MIB)]
    old, new = s.alloc(30 * MIB), s.alloc(30 * MIB)
    s.free(split[0])
    s.free(old)
    for _ in range(4):
        s.free(s.alloc(5 * MIB))
    s.free(new)
    yield Check("cached", now={"reserved_bytes.all.current": 80 * MIB})
    s.alloc(40 * MIB)
    yield Check("taken", {"segment": 0, "reserved_bytes": 10 * MIB})
    yield Check("kept", facts={"the newer": s.alloc(30 * MIB) == new})


@scenario(19, "oversize blocks", settings="max_split_size_mb:40")
def oversize(s: Subject) -> Steps:
    cached = s.alloc(100 * MIB)
    s.free(cached)
    yield Check("cached", {"oversize_segments": 1, "oversize_allocations": 0})
    s.alloc(30 * MIB)
    yield Check("far below", {"segment": 1, "oversize_segments": 0})
    ptr = s.alloc(90 * MIB)
    expected_changes = {"segment": 0, "oversize_allocations": 1, "allocated_bytes": 100 * MIB}
    yield Check("near", expected_changes, facts={"the same": ptr == cached})
    s.free(ptr)
    s.alloc(70 * MIB)
    yield Check("between", {"segment": 1, "oversize_segments": 1, "oversize_allocations": 0})
    s.reset_sums()
    s.reset_peaks()
    yield Check("reset", now={"oversize_segments.peak": 2, "oversize_segments.allocated": 0})


@scenario(20, "rounding")
def rounding(s: Subject) -> Steps:
    for settings, size, taken in ROUNDED:
        s.configure(settings)
        s.alloc(size)
        yield Check(settings or "none", {"active_bytes": taken, "requested_bytes": size})


INTERVALS = "roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]"
ROUNDED = (
    ("", 84 * MIB, 84 * MIB),
    ("roundup_power2_divisions:4", 84 * MIB, 96 * MIB),
    ("roundup_power2_divisions:4", 1200, 1536),
    ("garbage_collection_threshold:0.5", 84 * MIB, 84 * MIB),
    (INTERVALS, 84 * MIB, 88 * MIB),
    (INTERVALS, 400 * MIB, 512 * MIB),
    ("release_lock_on_cudamalloc:True", 84 * MIB, 84 * MIB),
)


@scenario(21, "settings that are refused")
def refused(s: Subject) -> Steps:
    yield Check("refused", facts={settings: s.refuses(settings) for settings in REFUSED})


REFUSED = (
    "foo:1,bar:2",
    "garbage_collection_threshold:1.2",
    "max_split_size_mb:2",
    "release_lock_on_cudamalloc:none",
    "pinned_use_cuda_host_register:none",
    "pinned_num_register_threads:none",
    "pinned_num_register_threads:1024",
)


@scenario(22, "what is free after waiting is not looked for")
def not_again(s: Subject) -> Steps:
    limit_to(s, 20 * MIB)
    pending, kept_ptr = s.alloc(9 * MIB), s.alloc(6 * MIB)
    s.busy("s1")
    s.use(pending, "s1")
    s.free(pending)
    facts = {"refused": s.refusal(9 * MIB) != ""}
    expected_changes = {"num_ooms": 1, "num_alloc_retries": 1, "num_sync_all_streams": 1}
    yield Check("refused", expected_changes, facts=facts)
    yield Check("next", facts={"the same": s.alloc(9 * MIB) == pending})
    s.free(kept_ptr)
    yield Check("freed", {"allocation": -1})


LIMITS = (
    beyond,
    halves,
    fraction,
    observed(""),
    observed("max_split_size_mb:1024"),
    available,
    largest_first,
    garbage,
    oldest_first,
    oversize,
    rounding,
    refused,
    not_again,
)
