"""Expandable segments: scenarios of mapping and unmapping, beside number 41."""

from __future__ import annotations

from allocator_scenarios.scenario import FREE, LIVE, MIB, Check, Steps, Subject, scenario

EXPANDABLE = "expandable_segments:True"


@scenario(41, "an expandable segment grows", settings=EXPANDABLE)
def grows(s: Subject) -> Steps:
    first = s.alloc(30 * MIB)
    expected_changes = {
        "reserved_bytes": 40 * MIB,
        "segment": 0,
        "num_device_alloc": 1,
        "inactive_split": 0,
    }
    yield Check("first", expected_changes, blocks=[[(30 * MIB, LIVE), (10 * MIB, FREE)]])
    s.alloc(30 * MIB)
    expected_changes = {"reserved_bytes": 20 * MIB, "num_device_alloc": 1}
    yield Check("second", expected_changes, blocks=[[(30 * MIB, LIVE), (30 * MIB, LIVE)]])
    s.free(first)
    second_ptr = s.alloc(20 * MIB)
    yield Check("again", {"reserved_bytes": 0}, facts={"low": second_ptr == first})
    s.alloc(MIB)
    yield Check("small", {"reserved_bytes.small_pool": 2 * MIB, "segment": 0})


@scenario(41, "an expandable segment shrinks", settings=EXPANDABLE)
def shrinks(s: Subject) -> Steps:
    held = [s.alloc(20 * MIB) for _ in range(4)]
    s.free(held[1])
    s.free(held[2])
    yield Check("freed", {"reserved_bytes": 80 * MIB})
    s.empty_cache()
    layout = [[(20 * MIB, LIVE)], [(20 * MIB, LIVE)]]
    expected_changes = {"reserved_bytes": -40 * MIB, "num_device_free": 1}
    yield Check("a hole", expected_changes, blocks=layout)
    filled = s.alloc(40 * MIB)
    yield Check("filled", {"reserved_bytes": 40 * MIB}, facts={"there": filled == held[1]})
    for ptr in (held[0], filled, held[3]):
        s.free(ptr)
    s.empty_cache()
    yield Check("gone", now={"reserved_bytes.all.current": 0}, blocks=[])


@scenario(41, "a block that is not whole pages is kept in part", settings=EXPANDABLE)
def partly(s: Subject) -> Steps:
    low, high = s.alloc(50 * MIB), s.alloc(50 * MIB)
    s.free(low)
    s.empty_cache()
    yield Check("emptied", {"reserved_bytes": 60 * MIB})
    s.free(high)
    s.empty_cache()
    yield Check("gone", now={"reserved_bytes.all.current": 0})


@scenario(41, "what is expandable rests while the setting is off", settings=EXPANDABLE)
def rests(s: Subject) -> Steps:
    first = s.alloc(30 * MIB)
    s.free(first)
    s.configure("")
    plain = s.alloc(30 * MIB)
    yield Check("off", {"segment": 1}, facts={"another": plain != first})
    s.configure(EXPANDABLE)
    second_ptr = s.alloc(20 * MIB)
    yield Check("on", {"segment": 0}, facts={"the first": second_ptr == first})


@scenario(41, "an expandable segment for each stream", settings=EXPANDABLE)
def of_streams(s: Subject) -> Steps:
    s.alloc(30 * MIB)
    other = s.alloc(30 * MIB, "s1")
    yield Check("both", {"reserved_bytes": 80 * MIB})
    s.busy("s2")
    s.use(other, "s2")
    s.free(other)
    yield Check("pending", {"active": 0, "allocation": -1})
    s.settle("s2")
    s.empty_cache()
    yield Check("emptied", {"active": -1})


@scenario(41, "memory is out in an expandable segment", settings=EXPANDABLE)
def full(s: Subject) -> Steps:
    s.limit((100 * MIB + MIB) / s.total_bytes)
    held = [s.alloc(40 * MIB), s.alloc(40 * MIB)]
    facts = {"refused": s.refusal(40 * MIB) != ""}
    yield Check("refused", {"num_ooms": 1, "num_alloc_retries": 1}, facts=facts)
    s.free(held[0])
    s.alloc(60 * MIB)
    yield Check("moved", {"num_ooms": 0, "num_alloc_retries": 1})


@scenario(
    41,
    "the limit to splitting counts for its own upstream",
    settings=f"{EXPANDABLE},max_split_size_mb:40",
)
def unsplit_in_own(s: Subject) -> Steps:
    pool = s.make_pool(own=True)
    with s.inside(pool):
        s.free(s.alloc(100 * MIB))
        s.alloc(90 * MIB)
    yield Check("taken whole", {"segment": 1}, blocks=[[(100 * MIB, LIVE)]])
    s.alloc(90 * MIB)
    yield Check("split elsewhere", {"segment": 0, "oversize_allocations": 1})
    with s.inside(pool):
        s.alloc(15 * MIB)
    # Of an expandable segment the MiB that is left of 16 would be split off.
    expected_changes = {"segment": 1, "inactive_split": 0, "allocated_bytes": 16 * MIB}
    yield Check("by the plain rule", expected_changes)


EXPANDABLE_SEGMENTS = (grows, shrinks, partly, rests, of_streams, full, unsplit_in_own)
