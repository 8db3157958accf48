"""Scenarios 35 to 42: private pools and their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

from allocator_scenarios.scenario import FREE, LIVE, MIB, Check, Steps, Subject, scenario


def in_threads(count: int, work: Callable[[], None]) -> None:
    threads = [Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@scenario(35, "ids and uses of pools")
def ids(s: Subject) -> Steps:
    first, second = s.make_pool(), s.make_pool()
    (a, low), (b, high) = s.pool_facts(first)[0], s.pool_facts(second)[0]
    uses = [s.pool_facts(first)[1]]
    with s.inside(first):
        uses.append(s.pool_facts(first)[1])
    uses.append(s.pool_facts(first)[1])
    made: list[Any] = []
    in_threads(4, lambda: made.append(s.make_pool()))
    numbers = {s.pool_facts(pool)[0] for pool in made}
    facts = {
        "users'": a == b == 0,
        "rising": low < high,
        "used": uses == [1, 2, 1],
        "unique": len(numbers) == 4,
    }
    yield Check("made", {"segment": 0}, facts=facts)


@scenario(36, "a pool with its own upstream")
def own_allocator(s: Subject) -> Steps:
    pool = s.make_pool(own=True)
    s.alloc(MIB)
    calls = [s.own_calls(pool)]
    with s.inside(pool):
        ptr = s.alloc(MIB)
    calls.append(s.own_calls(pool))
    yield Check("inside", {"segment": 2}, facts={"called": calls == [(0, 0), (1, 0)]})
    s.free(ptr)
    s.drop_pool(pool)
    yield Check("dropped", facts={"given back": s.own_calls(pool) == (1, 1)})


@scenario(36, "memory that outlives its pool")
def outlived(s: Subject) -> Steps:
    pool = s.make_pool(own=True)
    with s.inside(pool):
        ptr = s.alloc(MIB)
    s.drop_pool(pool)
    yield Check("dropped", {"segment": 1}, facts={"kept": s.own_calls(pool) == (1, 0)})
    s.free(ptr)
    s.empty_cache()
    yield Check("freed", {"segment": -1}, facts={"given back": s.own_calls(pool) == (1, 1)})


@scenario(
    36,
    "a pool that is used is no capture",
    without_torch="PyTorch before 2.15 takes use_mem_pool for a capture (its issue 159674)",
)
def no_capture(s: Subject) -> Steps:
    pending = s.alloc(30 * MIB)
    s.use(pending, "s1")
    s.free(pending)
    pool = s.make_pool()
    with s.inside(pool):
        s.alloc(512)
        yield Check("looks at events", {"active": 1})
        s.empty_cache()
        yield Check("gives back", {"segment": -1, "num_sync_all_streams": 1})


@scenario(37, "a pool that is used before memory is out")
def use_on_oom(s: Subject) -> Steps:
    s.limit((80 * MIB + MIB) / s.total_bytes)
    plain, lent = s.make_pool(), s.make_pool(use_on_oom=True)
    held = []
    for pool in (plain, lent):
        with s.inside(pool):
            held.append(s.alloc(40 * MIB))
    yield Check("full", {"num_ooms": 1}, facts={"refused": s.refusal(40 * MIB) != ""})
    for ptr in held:
        s.free(ptr)
    served = s.alloc(30 * MIB)
    yield Check("lent", {"num_ooms": 0}, facts={"the pool's": served == held[1]})
    yield Check("once", {"num_ooms": 1}, facts={"refused": s.refusal(30 * MIB) != ""})
    s.free(served)
    with s.inside(lent):
        second_ptr = s.alloc(40 * MIB)
    yield Check("the pool's own", {"segment": 0}, facts={"again": second_ptr == held[1]})
    s.free(second_ptr)
    s.drop_pool(lent)
    s.drop_pool(plain)
    s.alloc(40 * MIB)
    yield Check("gone", blocks=[[(40 * MIB, LIVE)]])


@scenario(37, "a pool lends plain blocks, split as such, where segments grow")
def lends_plain_blocks(s: Subject) -> Steps:
    s.limit((120 * MIB + MIB) / s.total_bytes)
    lent = s.make_pool(use_on_oom=True)
    with s.inside(lent):
        plain = s.alloc(50 * MIB)
    s.configure("expandable_segments:True")
    with s.inside(lent):
        grown = s.alloc(40 * MIB)
    s.free(plain)
    s.free(grown)
    s.alloc(20 * MIB)
    yield Check("full", {"reserved_bytes": 110 * MIB, "segment": 1})
    for label, size, held in (
        ("not the better fit", 30 * MIB, 30 * MIB),
        ("whole", 49 * MIB, 50 * MIB),
        ("split", 49 * MIB - 512, 49 * MIB - 512),
    ):
        served = s.alloc(size)
        facts = {"the plain one": served == plain}
        yield Check(label, {"allocated_bytes": held, "num_device_alloc": 0}, facts=facts)
        s.free(served)
        yield Check(f"{label}, freed", {"allocated_bytes": -held, "num_alloc_retries": 0})


@scenario(37, "a pool lends what is not to be split", settings="max_split_size_mb:40")
def lends_unsplit_blocks(s: Subject) -> Steps:
    s.limit((70 * MIB + MIB) / s.total_bytes)
    lent = s.make_pool(use_on_oom=True)
    with s.inside(lent):
        plain = s.alloc(50 * MIB)
    s.free(plain)
    s.configure("expandable_segments:True,max_split_size_mb:40")
    s.alloc(20 * MIB)
    yield Check("full", {"reserved_bytes": 70 * MIB, "oversize_segments": 1})
    served = s.alloc(40 * MIB)
    changes = {"allocated_bytes": 50 * MIB, "oversize_allocations": 1, "num_device_alloc": 0}
    yield Check("whole", changes, facts={"the plain one": served == plain})


@scenario(
    36,
    "what each private pool has reserved",
    without_torch="PyTorch before 2.15 counts all of them together",
)
def reserved_by_pool(s: Subject) -> Steps:
    first, second = s.make_pool(), s.make_pool()
    with s.inside(first):
        held = [s.alloc(30 * MIB), s.alloc(512)]
    with s.inside(second):
        s.alloc(512)
    s.alloc(512)
    by_pool = "reserved_bytes_by_private_pools.pool {}.{}"
    yield Check(
        "made",
        now={
            by_pool.format(1, "all.current"): 32 * MIB,
            by_pool.format(1, "small_pool.current"): 2 * MIB,
            by_pool.format(1, "large_pool.current"): 30 * MIB,
            by_pool.format(2, "all.current"): 2 * MIB,
        },
    )
    for ptr in held:
        s.free(ptr)
    s.drop_pool(first)
    gone = {by_pool.format(1, "all.current"): 0, by_pool.format(1, "all.peak"): 32 * MIB}
    yield Check("gone", now=gone | {by_pool.format(1, "all.freed"): 32 * MIB})
    s.reset_peaks()
    s.reset_sums()
    reset = (by_pool.format(1, f"all.{part}") for part in ("peak", "allocated", "freed"))
    kept = {by_pool.format(2, "all.peak"): 2 * MIB}
    yield Check("reset", now=dict.fromkeys(reset, 0) | kept)


@scenario(38, "a pool that splits nothing")
def no_split(s: Subject) -> Steps:
    pool = s.make_pool(no_split=True)
    with s.inside(pool):
        s.alloc(4 * MIB)
        s.alloc(4 * MIB)
    yield Check("two", {"segment": 2}, blocks=[[(20 * MIB, LIVE)], [(20 * MIB, LIVE)]])
    s.alloc(4 * MIB)
    s.alloc(4 * MIB)
    parts = [(4 * MIB, LIVE), (4 * MIB, LIVE), (12 * MIB, FREE)]
    yield Check("the default", {"segment": 1}, blocks=[*[[(20 * MIB, LIVE)]] * 2, parts])


@scenario(39, "pools within pools")
def nested(s: Subject) -> Steps:
    pools = [s.make_pool() for _ in range(3)]
    with s.inside(pools[0]):
        s.alloc(20 * MIB)
        with s.inside(pools[1]):
            s.alloc(20 * MIB)
            with s.inside(pools[2]):
                s.alloc(20 * MIB)
            s.alloc(20 * MIB)
        s.alloc(20 * MIB)
    counts = [len(s.pool_snapshot(pool)) for pool in pools]
    yield Check("made", {"segment": 5}, facts={"where": counts == [2, 2, 1]})


@scenario(40, "a pool of one thread")
def threads(s: Subject) -> Steps:
    pool = s.make_pool()
    with s.inside(pool):
        s.free(s.alloc(MIB))
        in_threads(1, lambda: [s.alloc(MIB) for _ in range(2)] and None)
    (own,) = s.pool_snapshot(pool)
    facts = {"none of its": own["active_size"] == 0}
    yield Check("both", {"segment": 2, "active_bytes": 2 * MIB}, facts=facts)


@scenario(41, "an allocator of its own is not expandable", settings="expandable_segments:True")
def not_expandable(s: Subject) -> Steps:
    pool = s.make_pool(own=True)
    with s.inside(pool):
        s.alloc(MIB)
    s.alloc(MIB)
    kinds = [segment["is_expandable"] for segment in s.snapshot()["segments"]]
    facts = {"one of two": sorted(kinds) == [False, True]}
    yield Check("both", {"segment": 1, "reserved_bytes": 4 * MIB}, facts=facts)


@scenario(42, "a checkpoint of small blocks")
def small_checkpoint(s: Subject) -> Steps:
    with s.capture("s1") as graph:
        held = [s.alloc(512, "s1") for _ in range(11)]
        for number, ptr in enumerate(held):
            if number not in (5, 8):
                s.free(ptr)
    live = [held[5], held[8]]
    yield Check("captured", {"allocation": 2})
    state = s.save_pool(graph)
    for ptr in live:
        s.free(ptr)
    yield Check("freed", {"allocation": -2}, blocks=[[(2 * MIB, FREE)]])
    found = s.restore_pool(graph, state, ())
    facts = {
        "the same": sorted(found) == sorted(live),
        "the set": s.live_set_is(graph, live),
        "no smaller set": not s.live_set_is(graph, live[:1]),
        "no larger set": not s.live_set_is(graph, [*live, held[0]]),
    }
    layout = [
        (2560, FREE),
        (512, LIVE),
        (1024, FREE),
        (512, LIVE),
        (2 * MIB - 4608, FREE),
    ]
    yield Check("restored", {"allocation": 2}, blocks=[layout], facts=facts)
    for ptr in live:
        s.free(ptr)
        yield Check("one less", {"allocation": -1})


@scenario(42, "a checkpoint of blocks of both kinds")
def mixed_checkpoint(s: Subject) -> Steps:
    with s.capture("s1") as graph:
        first = [s.alloc(8 * MIB, "s1"), s.alloc(MIB, "s1")]
    state = s.save_pool(graph)
    yield Check("captured", {"allocation": 2})
    s.free(first[0])
    with s.capture("s1", graph) as second:
        stale = [s.alloc(2 * MIB, "s1"), s.alloc(MIB // 2, "s1")]
    yield Check("another", {"allocation": 1})
    found = s.restore_pool(graph, state, [*stale, first[1]])
    own = [(8 * MIB, LIVE), (12 * MIB, FREE)]
    layout = [own, [(MIB, LIVE), (MIB, FREE)]]
    # The order of the segments is open: of what is freed it makes one peak, of what is divided another.
    peaks = s.statistics()
    facts = {
        "the same": sorted(found) == sorted(first),
        "freed in an order": peaks["inactive_split.all.peak"] in (2, 3),
        "divided in an order": peaks["active_bytes.all.peak"] in (20 * MIB, 21 * MIB),
    }
    s.reset_peaks()
    yield Check("restored", blocks=layout, facts=facts, restored=True)
    s.drop_graph(second)
    yield Check("one graph", {"segment": 0})


POOLS = (
    ids,
    own_allocator,
    outlived,
    no_capture,
    reserved_by_pool,
    use_on_oom,
    lends_plain_blocks,
    lends_unsplit_blocks,
    no_split,
    nested,
    threads,
    not_expandable,
    small_checkpoint,
    mixed_checkpoint,
)
