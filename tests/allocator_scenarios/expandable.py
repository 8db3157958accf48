"""Expandable segments: scenarios of mapping and unmapping, beside number 41."""

from __future__ import annotations

from allocator_scenarios.scenario import FREE, LIVE, MIB, Check, Steps, Subject, scenario

EXPANDABLE_SETTING = "expandable_segments:True"


@scenario(41, "an expandable segment grows", settings=EXPANDABLE_SETTING)
def segment_grows(subject: Subject) -> Steps:
    first_ptr = subject.alloc(30 * MIB)
    expected_changes = {
        "reserved_bytes": 40 * MIB,
        "segment": 0,
        "num_device_alloc": 1,
        "inactive_split": 0,
    }
    yield Check("first", expected_changes, blocks=[[(30 * MIB, LIVE), (10 * MIB, FREE)]])
    subject.alloc(30 * MIB)
    expected_changes = {"reserved_bytes": 20 * MIB, "num_device_alloc": 1}
    yield Check("second", expected_changes, blocks=[[(30 * MIB, LIVE), (30 * MIB, LIVE)]])
    subject.free(first_ptr)
    second_ptr = subject.alloc(20 * MIB)
    yield Check(
        "reused", {"reserved_bytes": 0}, facts={"first block is reused": second_ptr == first_ptr}
    )
    subject.alloc(MIB)
    yield Check("small", {"reserved_bytes.small_pool": 2 * MIB, "segment": 0})


@scenario(41, "an expandable segment shrinks", settings=EXPANDABLE_SETTING)
def segment_shrinks(subject: Subject) -> Steps:
    ptrs = [subject.alloc(20 * MIB) for _ in range(4)]
    subject.free(ptrs[1])
    subject.free(ptrs[2])
    yield Check("freed", {"reserved_bytes": 80 * MIB})
    subject.empty_cache()
    layout = [[(20 * MIB, LIVE)], [(20 * MIB, LIVE)]]
    expected_changes = {"reserved_bytes": -40 * MIB, "num_device_free": 1}
    yield Check("a hole", expected_changes, blocks=layout)
    filled_ptr = subject.alloc(40 * MIB)
    yield Check(
        "filled", {"reserved_bytes": 40 * MIB}, facts={"hole is filled": filled_ptr == ptrs[1]}
    )
    for ptr in (ptrs[0], filled_ptr, ptrs[3]):
        subject.free(ptr)
    subject.empty_cache()
    yield Check("released", now={"reserved_bytes.all.current": 0}, blocks=[])


@scenario(41, "pages at the edge of a freed block stay mapped", settings=EXPANDABLE_SETTING)
def edge_pages_stay_mapped(subject: Subject) -> Steps:
    low_ptr, high_ptr = subject.alloc(50 * MIB), subject.alloc(50 * MIB)
    subject.free(low_ptr)
    subject.empty_cache()
    yield Check("emptied", {"reserved_bytes": 60 * MIB})
    subject.free(high_ptr)
    subject.empty_cache()
    yield Check("released", now={"reserved_bytes.all.current": 0})


@scenario(
    41, "expandable segments are unused while the setting is off", settings=EXPANDABLE_SETTING
)
def unused_while_setting_off(subject: Subject) -> Steps:
    first_ptr = subject.alloc(30 * MIB)
    subject.free(first_ptr)
    subject.configure("")
    plain_ptr = subject.alloc(30 * MIB)
    yield Check("off", {"segment": 1}, facts={"another block": plain_ptr != first_ptr})
    subject.configure(EXPANDABLE_SETTING)
    second_ptr = subject.alloc(20 * MIB)
    yield Check("on", {"segment": 0}, facts={"first block is reused": second_ptr == first_ptr})


@scenario(41, "each stream has an expandable segment", settings=EXPANDABLE_SETTING)
def segment_per_stream(subject: Subject) -> Steps:
    subject.alloc(30 * MIB)
    other_ptr = subject.alloc(30 * MIB, "s1")
    yield Check("both", {"reserved_bytes": 80 * MIB})
    subject.keep_busy("s2")
    subject.record_use(other_ptr, "s2")
    subject.free(other_ptr)
    yield Check("pending", {"active": 0, "allocation": -1})
    subject.finish_work("s2")
    subject.empty_cache()
    yield Check("emptied", {"active": -1})


@scenario(41, "out of memory in an expandable segment", settings=EXPANDABLE_SETTING)
def out_of_memory(subject: Subject) -> Steps:
    subject.set_memory_fraction((100 * MIB + MIB) / subject.total_bytes)
    ptrs = [subject.alloc(40 * MIB), subject.alloc(40 * MIB)]
    facts = {"allocation fails": subject.out_of_memory_message(40 * MIB) != ""}
    yield Check("failed", {"num_ooms": 1, "num_alloc_retries": 1}, facts=facts)
    subject.free(ptrs[0])
    subject.alloc(60 * MIB)
    yield Check("allocated after a free", {"num_ooms": 0, "num_alloc_retries": 1})


@scenario(
    41,
    "max_split_size applies to a separate upstream",
    settings=f"{EXPANDABLE_SETTING},max_split_size_mb:40",
)
def max_split_size_in_separate_upstream(subject: Subject) -> Steps:
    pool = subject.make_pool(separate_upstream=True)
    with subject.use_pool(pool):
        subject.free(subject.alloc(100 * MIB))
        subject.alloc(90 * MIB)
    yield Check("taken whole", {"segment": 1}, blocks=[[(100 * MIB, LIVE)]])
    subject.alloc(90 * MIB)
    yield Check("split elsewhere", {"segment": 0, "oversize_allocations": 1})
    with subject.use_pool(pool):
        subject.alloc(15 * MIB)
    # In an expandable segment, the remaining MiB of 16 would be split off.
    expected_changes = {"segment": 1, "inactive_split": 0, "allocated_bytes": 16 * MIB}
    yield Check("not split", expected_changes)


EXPANDABLE_SEGMENTS = (
    segment_grows,
    segment_shrinks,
    edge_pages_stay_mapped,
    unused_while_setting_off,
    segment_per_stream,
    out_of_memory,
    max_split_size_in_separate_upstream,
)
