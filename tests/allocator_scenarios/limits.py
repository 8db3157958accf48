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


def limit_to(subject: Subject, size_bytes: int) -> None:
    """Limit the reserved bytes, with a margin for rounding of the fraction."""
    subject.set_memory_fraction((size_bytes + MIB) / subject.total_bytes)


@scenario(13, "more than the device has")
def more_than_device(subject: Subject) -> Steps:
    live_ptr = subject.alloc(MIB)
    message = subject.out_of_memory_message(800_000_000 * GIB)
    has_message = "Tried to allocate 800000000.00 GiB. GPU 0 has a total capacity of" in message
    yield Check("failed", {"num_ooms": 1, "num_alloc_retries": 1}, facts={"message": has_message})
    has_message = "Tried to allocate more than 1EB memory" in subject.out_of_memory_message(
        8_000_000_000 * GIB
    )
    yield Check("an EiB", {"num_ooms": 0}, facts={"message": has_message})
    subject.free(live_ptr)
    yield Check("freed", {"allocation": -1})


@scenario(14, "two allocations of half of the device")
def two_halves(subject: Subject) -> Steps:
    half_bytes = subject.total_bytes // 2 + 2 * MIB
    first_ptr = subject.alloc(half_bytes)
    facts = {"allocation fails": "Tried to allocate" in subject.out_of_memory_message(half_bytes)}
    yield Check("second", {"num_ooms": 1, "num_alloc_retries": 1}, facts=facts)
    subject.free(first_ptr)
    subject.alloc(half_bytes)
    yield Check("again", {"num_ooms": 0}, now={"num_device_alloc": 1})


@scenario(15, "memory fraction")
def memory_fraction(subject: Subject) -> Steps:
    subject.set_memory_fraction(0.5)
    subject.free(subject.alloc(int(0.499 * subject.total_bytes)))
    subject.empty_cache()
    yield Check("below", {"num_ooms": 0, "segment": 0})
    message = subject.out_of_memory_message(subject.total_bytes // 2 + 2 * MIB)
    yield Check(
        "above", {"num_ooms": 1}, facts={"message has the allowed bytes": " allowed" in message}
    )
    facts = {
        f"{fraction}": subject.memory_fraction_error(fraction) == error
        for fraction, error in INVALID_FRACTIONS
    }
    for value in (0.0, 0.25, 1.0):
        subject.set_memory_fraction(value)
        facts[f"{value} is returned"] = subject.memory_fraction() == value
    yield Check("values", facts=facts)


INVALID_FRACTIONS = ((1, "TypeError"), (-0.1, "ValueError"), (2.0, "ValueError"))


def observer_called(settings: str) -> Scenario:
    @scenario(16, f"observers, {settings or 'by default'}", settings=settings)
    def steps(subject: Subject) -> Steps:
        observer_calls: list[int] = []
        subject.on_out_of_memory(lambda: observer_calls.append(1))
        facts = {
            "allocation fails": subject.out_of_memory_message(4 << 40) != "",
            "observer called once": len(observer_calls) == 1,
        }
        yield Check("failed", {"num_ooms": 1}, facts=facts)

    return steps


@scenario(17, "unsplit blocks are released at the limit", settings="max_split_size_mb:40")
def unsplit_blocks_released(subject: Subject) -> Steps:
    limit_to(subject, 120 * MIB)
    ptrs = [subject.alloc(40 * MIB) for _ in range(3)]
    facts = {"allocation fails": subject.out_of_memory_message(40 * MIB) != ""}
    yield Check("fourth", {"num_ooms": 1, "oversize_allocations": 3}, facts=facts)
    for ptr in ptrs:
        subject.free(ptr)
    subject.alloc(120 * MIB)
    yield Check("all", {"num_sync_all_streams": 0, "num_ooms": 0}, blocks=[[(120 * MIB, LIVE)]])


@scenario(17, "the largest unsplit block is released first", settings="max_split_size_mb:40")
def largest_first(subject: Subject) -> Steps:
    limit_to(subject, 150 * MIB)
    for ptr in [subject.alloc(size * MIB) for size in (40, 60, 50)]:
        subject.free(ptr)
    subject.alloc(100 * MIB)
    yield Check("taken", blocks=[[(40 * MIB, FREE)], [(100 * MIB, LIVE)]])


@scenario(18, "garbage collection above the threshold", settings="garbage_collection_threshold:0.5")
def garbage_collection(subject: Subject) -> Steps:
    limit_to(subject, 120 * MIB)
    for ptr in [subject.alloc(40 * MIB) for _ in range(2)]:
        subject.free(ptr)
    subject.alloc(80 * MIB)
    yield Check("taken", {"num_sync_all_streams": 0}, blocks=[[(80 * MIB, LIVE)]])


@scenario(
    18,
    "garbage collection releases the oldest block first",
    settings="garbage_collection_threshold:0.3",
)
def oldest_garbage_first(subject: Subject) -> Steps:
    limit_to(subject, 200 * MIB)
    split = [subject.alloc(8 * MIB), subject.alloc(6 * MIB)]
    old_ptr, new_ptr = subject.alloc(30 * MIB), subject.alloc(30 * MIB)
    subject.free(split[0])
    subject.free(old_ptr)
    for _ in range(4):
        subject.free(subject.alloc(5 * MIB))
    subject.free(new_ptr)
    yield Check("cached", now={"reserved_bytes.all.current": 80 * MIB})
    subject.alloc(40 * MIB)
    yield Check("taken", {"segment": 0, "reserved_bytes": 10 * MIB})
    yield Check("kept", facts={"newer block is left": subject.alloc(30 * MIB) == new_ptr})


@scenario(19, "oversize blocks serve near sizes only", settings="max_split_size_mb:40")
def oversize_blocks(subject: Subject) -> Steps:
    cached_ptr = subject.alloc(100 * MIB)
    subject.free(cached_ptr)
    yield Check("cached", {"oversize_segments": 1, "oversize_allocations": 0})
    subject.alloc(30 * MIB)
    yield Check("far below", {"segment": 1, "oversize_segments": 0})
    ptr = subject.alloc(90 * MIB)
    expected_changes = {"segment": 0, "oversize_allocations": 1, "allocated_bytes": 100 * MIB}
    yield Check("near", expected_changes, facts={"same block": ptr == cached_ptr})
    subject.free(ptr)
    subject.alloc(70 * MIB)
    yield Check("between", {"segment": 1, "oversize_segments": 1, "oversize_allocations": 0})
    subject.reset_sums()
    subject.reset_peaks()
    yield Check("reset", now={"oversize_segments.peak": 2, "oversize_segments.allocated": 0})


@scenario(20, "size rounding by settings")
def size_rounding(subject: Subject) -> Steps:
    for settings, size, block_bytes in ROUNDED_SIZES:
        subject.configure(settings)
        subject.alloc(size)
        yield Check(settings or "none", {"active_bytes": block_bytes, "requested_bytes": size})


INTERVAL_SETTINGS = "roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]"
ROUNDED_SIZES = (
    ("", 84 * MIB, 84 * MIB),
    ("roundup_power2_divisions:4", 84 * MIB, 96 * MIB),
    ("roundup_power2_divisions:4", 1200, 1536),
    ("garbage_collection_threshold:0.5", 84 * MIB, 84 * MIB),
    (INTERVAL_SETTINGS, 84 * MIB, 88 * MIB),
    (INTERVAL_SETTINGS, 400 * MIB, 512 * MIB),
    ("release_lock_on_cudamalloc:True", 84 * MIB, 84 * MIB),
)


@scenario(21, "invalid settings")
def invalid_settings(subject: Subject) -> Steps:
    yield Check(
        "refused",
        facts={settings: subject.rejects_settings(settings) for settings in INVALID_SETTINGS},
    )


INVALID_SETTINGS = (
    "foo:1,bar:2",
    "garbage_collection_threshold:1.2",
    "max_split_size_mb:2",
    "release_lock_on_cudamalloc:none",
    "pinned_use_cuda_host_register:none",
    "pinned_num_register_threads:none",
    "pinned_num_register_threads:1024",
)


@scenario(22, "blocks freed by synchronization are not searched again")
def no_second_search(subject: Subject) -> Steps:
    limit_to(subject, 20 * MIB)
    pending_ptr, live_ptr = subject.alloc(9 * MIB), subject.alloc(6 * MIB)
    subject.keep_busy("s1")
    subject.record_use(pending_ptr, "s1")
    subject.free(pending_ptr)
    facts = {"allocation fails": subject.out_of_memory_message(9 * MIB) != ""}
    expected_changes = {"num_ooms": 1, "num_alloc_retries": 1, "num_sync_all_streams": 1}
    yield Check("failed", expected_changes, facts=facts)
    yield Check("next", facts={"same block": subject.alloc(9 * MIB) == pending_ptr})
    subject.free(live_ptr)
    yield Check("freed", {"allocation": -1})


LIMITS = (
    more_than_device,
    two_halves,
    memory_fraction,
    observer_called(""),
    observer_called("max_split_size_mb:1024"),
    unsplit_blocks_released,
    largest_first,
    garbage_collection,
    oldest_garbage_first,
    oversize_blocks,
    size_rounding,
    invalid_settings,
    no_second_search,
)
