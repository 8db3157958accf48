"""Scenarios 23 to 29: what several streams use."""

from __future__ import annotations

from allocator_scenarios.scenario import FREE, LIVE, MIB, PENDING, Check, Steps, scenario
from allocator_scenarios.subject import Subject

SIZE = 30 * MIB


@scenario(23, "a block that another stream uses")
def in_use_elsewhere(s: Subject) -> Steps:
    ptr = s.alloc(SIZE)
    s.busy("s1")
    s.use(ptr, "s1")
    yield Check("used", {"allocation": 1})
    s.free(ptr)
    yield Check("freed", {"allocation": -1, "active": 0}, blocks=[[(SIZE, PENDING)]])
    second = s.alloc(SIZE)
    yield Check("second", {"segment": 1}, facts={"another": second != ptr})
    s.settle("s1")
    third = s.alloc(SIZE)
    yield Check("third", {"segment": 0}, facts={"the first": third == ptr})


@scenario(24, "its own stream uses a block")
def own_stream(s: Subject) -> Steps:
    ptr = s.alloc(SIZE, "s1")
    s.busy("s1")
    s.use(ptr, "s1")
    s.free(ptr)
    yield Check("freed", {"active": 0}, blocks=[[(SIZE, FREE)]])
    yield Check("again", facts={"the same": s.alloc(SIZE, "s1") == ptr})
    s.settle("s1")


@scenario(25, "a stream that is behind holds back its own only")
def behind(s: Subject) -> Steps:
    first, second, third = (s.alloc(SIZE) for _ in range(3))
    s.busy("s1")
    for ptr, stream in ((first, "s1"), (second, "s1"), (third, "s2")):
        s.use(ptr, stream)
        s.free(ptr)
    yield Check("freed", {"active": 3}, blocks=[[(SIZE, PENDING)]] * 3)
    s.alloc(512)
    state = [[(SIZE, PENDING)], [(SIZE, PENDING)], [(SIZE, FREE)]]
    yield Check("later", blocks=[*state, [(512, LIVE), (2 * MIB - 512, FREE)]])
    s.settle("s1")
    s.alloc(512)
    yield Check("settled", {"active": -1}, now={"active.large_pool.current": 0})


@scenario(26, "a stream's cache serves no other")
def silos(s: Subject) -> Steps:
    s.free(s.alloc(MIB, "s1"))
    s.alloc(MIB, "s2")
    yield Check("both", {"segment": 2})
    s.alloc(MIB, "s1")
    yield Check("own", {"segment": 0})


@scenario(27, "an empty cache waits for other streams")
def emptied(s: Subject) -> Steps:
    ptr = s.alloc(SIZE)
    s.busy("s1")
    s.use(ptr, "s1")
    s.free(ptr)
    s.empty_cache()
    yield Check("emptied", {"active": 0, "num_sync_all_streams": 1}, blocks=[])


@scenario(28, "three streams use a block")
def three_uses(s: Subject) -> Steps:
    streams = ("s1", "s2", "s3")
    ptr = s.alloc(SIZE)
    for stream in streams:
        s.busy(stream)
        s.use(ptr, stream)
        s.use(ptr, stream)
    s.free(ptr)
    for number, stream in enumerate(streams):
        s.settle(stream)
        s.free(s.alloc(512))
        state = PENDING if number < 2 else FREE
        yield Check(f"{stream} done", blocks=[[(SIZE, state)], [(2 * MIB, FREE)]])


@scenario(29, "a free from within", without_torch="only cudakit may be called from a finalizer")
def from_within(s: Subject) -> Steps:
    kept = s.alloc(SIZE)
    s.on_out_of_memory(lambda: s.free(kept))
    facts = {"refused": s.refusal(4 << 40) != ""}
    yield Check("refused", {"num_ooms": 1, "active": 0}, facts=facts)


STREAM_SCENARIOS = (
    in_use_elsewhere,
    own_stream,
    behind,
    silos,
    emptied,
    three_uses,
    from_within,
)
