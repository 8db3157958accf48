"""Scenarios 35 to 42: private pools and their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

from allocator_scenarios.scenario import FREE, LIVE, MIB, Check, Steps, Subject, scenario


def run_in_threads(thread_count: int, function: Callable[[], None]) -> None:
    threads = [Thread(target=function) for _ in range(thread_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@scenario(35, "ids and use counts of pools")
def pool_ids(subject: Subject) -> Steps:
    first, second = subject.make_pool(), subject.make_pool()
    (high_word_a, low_word_a), (high_word_b, low_word_b) = (
        subject.pool_id_and_use_count(first)[0],
        subject.pool_id_and_use_count(second)[0],
    )
    use_counts = [subject.pool_id_and_use_count(first)[1]]
    with subject.use_pool(first):
        use_counts.append(subject.pool_id_and_use_count(first)[1])
    use_counts.append(subject.pool_id_and_use_count(first)[1])
    pools_made: list[Any] = []
    run_in_threads(4, lambda: pools_made.append(subject.make_pool()))
    ids = {subject.pool_id_and_use_count(pool)[0] for pool in pools_made}
    facts = {
        "user pools have a zero word": high_word_a == high_word_b == 0,
        "ids rise": low_word_a < low_word_b,
        "use counts": use_counts == [1, 2, 1],
        "ids are unique": len(ids) == 4,
    }
    yield Check("made", {"segment": 0}, facts=facts)


@scenario(36, "a pool with a separate upstream")
def separate_upstream(subject: Subject) -> Steps:
    pool = subject.make_pool(separate_upstream=True)
    subject.alloc(MIB)
    calls = [subject.upstream_call_counts(pool)]
    with subject.use_pool(pool):
        ptr = subject.alloc(MIB)
    calls.append(subject.upstream_call_counts(pool))
    yield Check(
        "inside",
        {"segment": 2},
        facts={"upstream is called inside only": calls == [(0, 0), (1, 0)]},
    )
    subject.free(ptr)
    subject.close_pool(pool)
    yield Check(
        "closed", facts={"upstream memory is freed": subject.upstream_call_counts(pool) == (1, 1)}
    )


@scenario(36, "memory that outlives its pool")
def memory_outlives_pool(subject: Subject) -> Steps:
    pool = subject.make_pool(separate_upstream=True)
    with subject.use_pool(pool):
        ptr = subject.alloc(MIB)
    subject.close_pool(pool)
    yield Check(
        "closed",
        {"segment": 1},
        facts={"upstream memory is kept": subject.upstream_call_counts(pool) == (1, 0)},
    )
    subject.free(ptr)
    subject.empty_cache()
    yield Check(
        "freed",
        {"segment": -1},
        facts={"upstream memory is freed": subject.upstream_call_counts(pool) == (1, 1)},
    )


@scenario(
    36,
    "use_pool outside a capture is not treated as a capture",
    without_torch="PyTorch before 2.15 takes use_mem_pool for a capture (its issue 159674)",
)
def pool_is_not_a_capture(subject: Subject) -> Steps:
    pending_ptr = subject.alloc(30 * MIB)
    subject.record_use(pending_ptr, "s1")
    subject.free(pending_ptr)
    pool = subject.make_pool()
    with subject.use_pool(pool):
        subject.alloc(512)
        yield Check("events are queried", {"active": 1})
        subject.empty_cache()
        yield Check("released", {"segment": -1, "num_sync_all_streams": 1})


@scenario(37, "use_on_oom serves other requests at the limit")
def pool_serves_others_at_limit(subject: Subject) -> Steps:
    subject.set_memory_fraction((80 * MIB + MIB) / subject.total_bytes)
    plain_ptr, oom_pool = subject.make_pool(), subject.make_pool(use_on_oom=True)
    ptrs = []
    for pool in (plain_ptr, oom_pool):
        with subject.use_pool(pool):
            ptrs.append(subject.alloc(40 * MIB))
    yield Check(
        "full",
        {"num_ooms": 1},
        facts={"allocation fails": subject.out_of_memory_message(40 * MIB) != ""},
    )
    for ptr in ptrs:
        subject.free(ptr)
    served_ptr = subject.alloc(30 * MIB)
    yield Check(
        "served by the pool", {"num_ooms": 0}, facts={"block of the pool": served_ptr == ptrs[1]}
    )
    yield Check(
        "a second request",
        {"num_ooms": 1},
        facts={"allocation fails": subject.out_of_memory_message(30 * MIB) != ""},
    )
    subject.free(served_ptr)
    with subject.use_pool(oom_pool):
        second_ptr = subject.alloc(40 * MIB)
    yield Check("inside the pool", {"segment": 0}, facts={"block is reused": second_ptr == ptrs[1]})
    subject.free(second_ptr)
    subject.close_pool(oom_pool)
    subject.close_pool(plain_ptr)
    subject.alloc(40 * MIB)
    yield Check("released", blocks=[[(40 * MIB, LIVE)]])


@scenario(37, "use_on_oom with plain and expandable segments")
def plain_blocks_served_at_limit(subject: Subject) -> Steps:
    subject.set_memory_fraction((120 * MIB + MIB) / subject.total_bytes)
    oom_pool = subject.make_pool(use_on_oom=True)
    with subject.use_pool(oom_pool):
        plain_ptr = subject.alloc(50 * MIB)
    subject.configure("expandable_segments:True")
    with subject.use_pool(oom_pool):
        expandable_ptr = subject.alloc(40 * MIB)
    subject.free(plain_ptr)
    subject.free(expandable_ptr)
    subject.alloc(20 * MIB)
    yield Check("full", {"reserved_bytes": 110 * MIB, "segment": 1})
    for label, size, block_bytes in (
        ("not the better fit", 30 * MIB, 30 * MIB),
        ("whole", 49 * MIB, 50 * MIB),
        ("split", 49 * MIB - 512, 49 * MIB - 512),
    ):
        served_ptr = subject.alloc(size)
        facts = {"plain block is used": served_ptr == plain_ptr}
        yield Check(label, {"allocated_bytes": block_bytes, "num_device_alloc": 0}, facts=facts)
        subject.free(served_ptr)
        yield Check(f"{label}, freed", {"allocated_bytes": -block_bytes, "num_alloc_retries": 0})


@scenario(37, "use_on_oom with max_split_size", settings="max_split_size_mb:40")
def unsplit_blocks_served_at_limit(subject: Subject) -> Steps:
    subject.set_memory_fraction((70 * MIB + MIB) / subject.total_bytes)
    oom_pool = subject.make_pool(use_on_oom=True)
    with subject.use_pool(oom_pool):
        plain_ptr = subject.alloc(50 * MIB)
    subject.free(plain_ptr)
    subject.configure("expandable_segments:True,max_split_size_mb:40")
    subject.alloc(20 * MIB)
    yield Check("full", {"reserved_bytes": 70 * MIB, "oversize_segments": 1})
    served_ptr = subject.alloc(40 * MIB)
    changes = {"allocated_bytes": 50 * MIB, "oversize_allocations": 1, "num_device_alloc": 0}
    yield Check("whole", changes, facts={"plain block is used": served_ptr == plain_ptr})


@scenario(
    36,
    "reserved bytes of each private pool",
    without_torch="PyTorch before 2.15 counts all of them together",
)
def reserved_bytes_by_pool(subject: Subject) -> Steps:
    first, second = subject.make_pool(), subject.make_pool()
    with subject.use_pool(first):
        ptrs = [subject.alloc(30 * MIB), subject.alloc(512)]
    with subject.use_pool(second):
        subject.alloc(512)
    subject.alloc(512)
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
    for ptr in ptrs:
        subject.free(ptr)
    subject.close_pool(first)
    gone = {by_pool.format(1, "all.current"): 0, by_pool.format(1, "all.peak"): 32 * MIB}
    yield Check("released", now=gone | {by_pool.format(1, "all.freed"): 32 * MIB})
    subject.reset_peaks()
    subject.reset_sums()
    reset = (by_pool.format(1, f"all.{part}") for part in ("peak", "allocated", "freed"))
    kept = {by_pool.format(2, "all.peak"): 2 * MIB}
    yield Check("reset", now=dict.fromkeys(reset, 0) | kept)


@scenario(38, "a pool with no_split")
def pool_without_splits(subject: Subject) -> Steps:
    pool = subject.make_pool(no_split=True)
    with subject.use_pool(pool):
        subject.alloc(4 * MIB)
        subject.alloc(4 * MIB)
    yield Check("two", {"segment": 2}, blocks=[[(20 * MIB, LIVE)], [(20 * MIB, LIVE)]])
    subject.alloc(4 * MIB)
    subject.alloc(4 * MIB)
    parts = [(4 * MIB, LIVE), (4 * MIB, LIVE), (12 * MIB, FREE)]
    yield Check("the default", {"segment": 1}, blocks=[*[[(20 * MIB, LIVE)]] * 2, parts])


@scenario(39, "nested pools")
def nested_pools(subject: Subject) -> Steps:
    pools = [subject.make_pool() for _ in range(3)]
    with subject.use_pool(pools[0]):
        subject.alloc(20 * MIB)
        with subject.use_pool(pools[1]):
            subject.alloc(20 * MIB)
            with subject.use_pool(pools[2]):
                subject.alloc(20 * MIB)
            subject.alloc(20 * MIB)
        subject.alloc(20 * MIB)
    counts = [len(subject.pool_snapshot(pool)) for pool in pools]
    yield Check("made", {"segment": 5}, facts={"segments of each pool": counts == [2, 2, 1]})


@scenario(40, "use_pool affects one thread only")
def pool_of_one_thread(subject: Subject) -> Steps:
    pool = subject.make_pool()
    with subject.use_pool(pool):
        subject.free(subject.alloc(MIB))
        run_in_threads(1, lambda: [subject.alloc(MIB) for _ in range(2)] and None)
    (segment,) = subject.pool_snapshot(pool)
    facts = {"pool has no live block": segment["active_size"] == 0}
    yield Check("both", {"segment": 2, "active_bytes": 2 * MIB}, facts=facts)


@scenario(
    41, "segments of a separate upstream are not expandable", settings="expandable_segments:True"
)
def separate_upstream_is_not_expandable(subject: Subject) -> Steps:
    pool = subject.make_pool(separate_upstream=True)
    with subject.use_pool(pool):
        subject.alloc(MIB)
    subject.alloc(MIB)
    kinds = [segment["is_expandable"] for segment in subject.snapshot()["segments"]]
    facts = {"one segment is expandable": sorted(kinds) == [False, True]}
    yield Check("both", {"segment": 1, "reserved_bytes": 4 * MIB}, facts=facts)


@scenario(42, "a checkpoint of small blocks")
def small_checkpoint(subject: Subject) -> Steps:
    with subject.capture("s1") as graph:
        ptrs = [subject.alloc(512, "s1") for _ in range(11)]
        for number, ptr in enumerate(ptrs):
            if number not in (5, 8):
                subject.free(ptr)
    live = [ptrs[5], ptrs[8]]
    yield Check("captured", {"allocation": 2})
    state = subject.save_pool(graph)
    for ptr in live:
        subject.free(ptr)
    yield Check("freed", {"allocation": -2}, blocks=[[(2 * MIB, FREE)]])
    restored_ptrs = subject.restore_pool(graph, state, ())
    facts = {
        "restored blocks": sorted(restored_ptrs) == sorted(live),
        "live set is equal": subject.live_allocations_are(graph, live),
        "smaller set is not equal": not subject.live_allocations_are(graph, live[:1]),
        "larger set is not equal": not subject.live_allocations_are(graph, [*live, ptrs[0]]),
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
        subject.free(ptr)
        yield Check("one freed", {"allocation": -1})


@scenario(42, "a checkpoint of small and large blocks")
def mixed_checkpoint(subject: Subject) -> Steps:
    with subject.capture("s1") as graph:
        first = [subject.alloc(8 * MIB, "s1"), subject.alloc(MIB, "s1")]
    state = subject.save_pool(graph)
    yield Check("captured", {"allocation": 2})
    subject.free(first[0])
    with subject.capture("s1", graph) as second:
        stale_ptrs = [subject.alloc(2 * MIB, "s1"), subject.alloc(MIB // 2, "s1")]
    yield Check("captured again", {"allocation": 1})
    restored_ptrs = subject.restore_pool(graph, state, [*stale_ptrs, first[1]])
    first_segment = [(8 * MIB, LIVE), (12 * MIB, FREE)]
    layout = [first_segment, [(MIB, LIVE), (MIB, FREE)]]
    # The order of segments is not defined; it determines the peaks of freed and of split blocks.
    peaks = subject.statistics()
    facts = {
        "restored blocks": sorted(restored_ptrs) == sorted(first),
        "peak of frees": peaks["inactive_split.all.peak"] in (2, 3),
        "peak of splits": peaks["active_bytes.all.peak"] in (20 * MIB, 21 * MIB),
    }
    subject.reset_peaks()
    yield Check("restored", blocks=layout, facts=facts, restored=True)
    subject.close_graph(second)
    yield Check("one graph", {"segment": 0})


POOLS = (
    pool_ids,
    separate_upstream,
    memory_outlives_pool,
    pool_is_not_a_capture,
    reserved_bytes_by_pool,
    pool_serves_others_at_limit,
    plain_blocks_served_at_limit,
    unsplit_blocks_served_at_limit,
    pool_without_splits,
    nested_pools,
    pool_of_one_thread,
    separate_upstream_is_not_expandable,
    small_checkpoint,
    mixed_checkpoint,
)
