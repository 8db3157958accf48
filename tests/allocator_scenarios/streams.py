"""Scenarios 23 to 34: several streams, and captures."""

from __future__ import annotations

from allocator_scenarios.scenario import (
    FREE,
    KIB,
    LIVE,
    MIB,
    PENDING,
    Check,
    Scenario,
    Steps,
    Subject,
    scenario,
)

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
def stream_pools(s: Subject) -> Steps:
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
    kept_ptr = s.alloc(SIZE)
    s.on_out_of_memory(lambda: s.free(kept_ptr))
    facts = {"refused": s.refusal(4 << 40) != ""}
    yield Check("refused", {"num_ooms": 1, "active": 0}, facts=facts)


# Of each block: the segments that are taken, the MiB, and the MiB of them that a result keeps.
CAPTURED = (
    (512, 1, 2, 2),
    (MIB, 2, 4, 2),
    (MIB + 512, 1, 20, 20),
    (10 * MIB - 512, 2, 40, 20),
    (10 * MIB + 512, 3, 36, 12),
)


def captured(size: int, segments: int, mib: int, kept_mib: int) -> Scenario:
    @scenario(30, f"a capture of blocks of {size / KIB:g} KiB")
    def steps(s: Subject) -> Steps:
        with s.capture("s1") as graph:
            result, between = s.alloc(size, "s1"), 0
            for _ in range(5):
                copy = s.alloc(size, "s1")
                s.free(between)
                between, after = copy, s.alloc(size, "s1")
                s.free(result)
                result = after
        yield Check("captured", {"num_device_alloc": segments, "reserved_bytes": mib * MIB})
        s.free(between)
        s.empty_cache()
        yield Check("kept by the graph", {"reserved_bytes": 0, "num_sync_all_streams": 1})
        s.drop_graph(graph)
        yield Check("without the graph", {"reserved_bytes": 0})
        s.empty_cache()
        yield Check("emptied", now={"reserved_bytes.all.current": kept_mib * MIB})
        s.free(result)
        s.empty_cache()
        yield Check("without the result", now={"reserved_bytes.all.current": 0})

    return steps


@scenario(31, "captures with pools of their own, and with one")
def shared_pool(s: Subject) -> Steps:
    with s.capture("s1"):
        s.alloc(512, "s1")
    with s.capture("s1"):
        s.alloc(512, "s1")
    yield Check("own pools", {"reserved_bytes": 4 * MIB})
    with s.capture("s1") as first:
        s.alloc(512, "s1")
    with s.capture("s1", first) as second:
        freed = s.alloc(512, "s1")
        s.free(freed)
    yield Check("one pool", {"reserved_bytes": 2 * MIB})
    with s.capture("s1", second):
        second_ptr = s.alloc(512, "s1")
    yield Check("third", {"reserved_bytes": 0}, facts={"reused": second_ptr == freed})


@scenario(32, "a graph keeps its memory")
def kept(s: Subject) -> Steps:
    with s.capture("s1") as graph:
        s.free(s.alloc(SIZE, "s1"))
    s.empty_cache()
    yield Check("emptied", now={"reserved_bytes.all.current": SIZE})
    s.free(s.alloc(SIZE, "s1"))
    yield Check("others", now={"reserved_bytes.all.current": 2 * SIZE})
    s.drop_graph(graph)
    s.empty_cache()
    yield Check("gone", now={"reserved_bytes.all.current": 0, "num_device_free": 2})


@scenario(33, "a capture asks no event, and defers frees")
def deferred(s: Subject) -> Steps:
    before = s.alloc(SIZE)
    s.busy("s1")
    s.use(before, "s1")
    s.free(before)
    with s.capture("s2"):
        s.settle("s1")
        during = s.alloc(SIZE, "s2")
        s.use(during, "s3")
        s.free(during)
        s.empty_cache()
        second = s.alloc(SIZE, "s2")
        yield Check("captured", {"active": 3}, facts={"another": second != during})
    yield Check("ended", {"active": 0})
    s.alloc(512)
    yield Check("later", {"active": -1}, now={"active.large_pool.current": 1})
    yield Check("the first", facts={"is free": s.alloc(SIZE) == before})


REUSE = "graph_capture_record_stream_reuse:True"


@scenario(34, "reuse within a capture, two streams", settings=REUSE)
def two_streams(s: Subject) -> Steps:
    with s.capture("s1"):
        s.work("s1")
        s.join("s2", "s1")
        ptr = s.alloc(SIZE, "s1")
        s.use(ptr, "s2")
        s.work("s2")
        s.free(ptr)
        early = s.alloc(SIZE, "s1")
        yield Check("before they join", {"active": 2}, facts={"another": early != ptr})
        s.join("s1", "s2")
        s.work("s1")
        late = s.alloc(SIZE, "s1")
        yield Check("after", {"active": 0}, facts={"the same": late == ptr})


@scenario(34, "reuse within a capture, four streams", settings=REUSE)
def four_streams(s: Subject) -> Steps:
    others = ("s2", "s3", "s4")
    with s.capture("s1"):
        s.work("s1")
        ptr = s.alloc(SIZE, "s1")
        for other in others:
            s.join(other, "s1")
            s.use(ptr, other)
            s.work(other)
        s.free(ptr)
        for number, other in enumerate(others):
            s.join("s1", other)
            s.work("s1")
            second_ptr = s.alloc(SIZE, "s1")
            reused = second_ptr == ptr
            yield Check(f"{other} has joined", facts={"reused at last": reused == (number == 2)})


@scenario(34, "no reuse where a stream is not captured", settings=REUSE)
def outside(s: Subject) -> Steps:
    with s.capture("s1"):
        s.work("s1")
        ptr = s.alloc(SIZE, "s1")
        s.use(ptr, "s2")
        s.free(ptr)
        s.work("s1")
        facts = {"another": s.alloc(SIZE, "s1") != ptr}
        yield Check("captured", facts=facts)
    s.alloc(512)
    yield Check("later", blocks=[[(SIZE, FREE)], [(SIZE, "active_allocated")], SMALL])


SMALL = [(512, "active_allocated"), (2 * MIB - 512, FREE)]

STREAM_SCENARIOS = (
    in_use_elsewhere,
    own_stream,
    behind,
    stream_pools,
    emptied,
    three_uses,
    from_within,
    *(captured(*case) for case in CAPTURED),
    shared_pool,
    kept,
    deferred,
    two_streams,
    four_streams,
    outside,
)
