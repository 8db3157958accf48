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

BLOCK_BYTES = 30 * MIB


@scenario(23, "a block in use by another stream")
def in_use_elsewhere(subject: Subject) -> Steps:
    ptr = subject.alloc(BLOCK_BYTES)
    subject.keep_busy("s1")
    subject.record_use(ptr, "s1")
    yield Check("used", {"allocation": 1})
    subject.free(ptr)
    yield Check("freed", {"allocation": -1, "active": 0}, blocks=[[(BLOCK_BYTES, PENDING)]])
    second_ptr = subject.alloc(BLOCK_BYTES)
    yield Check("second", {"segment": 1}, facts={"another block": second_ptr != ptr})
    subject.finish_work("s1")
    third_ptr = subject.alloc(BLOCK_BYTES)
    yield Check("third", {"segment": 0}, facts={"first block is reused": third_ptr == ptr})


@scenario(24, "record_stream with the stream of the block")
def record_stream_of_same_stream(subject: Subject) -> Steps:
    ptr = subject.alloc(BLOCK_BYTES, "s1")
    subject.keep_busy("s1")
    subject.record_use(ptr, "s1")
    subject.free(ptr)
    yield Check("freed", {"active": 0}, blocks=[[(BLOCK_BYTES, FREE)]])
    yield Check("again", facts={"same block": subject.alloc(BLOCK_BYTES, "s1") == ptr})
    subject.finish_work("s1")


@scenario(25, "a busy stream delays only the blocks it uses")
def busy_stream_delays_its_blocks(subject: Subject) -> Steps:
    first_ptr, second_ptr, third_ptr = (subject.alloc(BLOCK_BYTES) for _ in range(3))
    subject.keep_busy("s1")
    for ptr, stream in ((first_ptr, "s1"), (second_ptr, "s1"), (third_ptr, "s2")):
        subject.record_use(ptr, stream)
        subject.free(ptr)
    yield Check("freed", {"active": 3}, blocks=[[(BLOCK_BYTES, PENDING)]] * 3)
    subject.alloc(512)
    state = [[(BLOCK_BYTES, PENDING)], [(BLOCK_BYTES, PENDING)], [(BLOCK_BYTES, FREE)]]
    yield Check("later", blocks=[*state, [(512, LIVE), (2 * MIB - 512, FREE)]])
    subject.finish_work("s1")
    subject.alloc(512)
    yield Check("finished", {"active": -1}, now={"active.large_pool.current": 0})


@scenario(26, "free blocks serve their own stream only")
def free_blocks_by_stream(subject: Subject) -> Steps:
    subject.free(subject.alloc(MIB, "s1"))
    subject.alloc(MIB, "s2")
    yield Check("both", {"segment": 2})
    subject.alloc(MIB, "s1")
    yield Check("own block", {"segment": 0})


@scenario(27, "empty_cache waits for other streams")
def empty_cache_waits(subject: Subject) -> Steps:
    ptr = subject.alloc(BLOCK_BYTES)
    subject.keep_busy("s1")
    subject.record_use(ptr, "s1")
    subject.free(ptr)
    subject.empty_cache()
    yield Check("emptied", {"active": 0, "num_sync_all_streams": 1}, blocks=[])


@scenario(28, "a block in use by three streams")
def three_streams_use_block(subject: Subject) -> Steps:
    streams = ("s1", "s2", "s3")
    ptr = subject.alloc(BLOCK_BYTES)
    for stream in streams:
        subject.keep_busy(stream)
        subject.record_use(ptr, stream)
        subject.record_use(ptr, stream)
    subject.free(ptr)
    for number, stream in enumerate(streams):
        subject.finish_work(stream)
        subject.free(subject.alloc(512))
        state = PENDING if number < 2 else FREE
        yield Check(f"{stream} done", blocks=[[(BLOCK_BYTES, state)], [(2 * MIB, FREE)]])


@scenario(
    29,
    "a free inside the out-of-memory observer",
    without_torch="only cudakit may be called from a finalizer",
)
def free_in_observer(subject: Subject) -> Steps:
    live_ptr = subject.alloc(BLOCK_BYTES)
    subject.on_out_of_memory(lambda: subject.free(live_ptr))
    facts = {"allocation fails": subject.out_of_memory_message(4 << 40) != ""}
    yield Check("failed", {"num_ooms": 1, "active": 0}, facts=facts)


# Bytes of each block, number of new segments, their MiB, and the MiB that the result keeps.
CAPTURE_CASES = (
    (512, 1, 2, 2),
    (MIB, 2, 4, 2),
    (MIB + 512, 1, 20, 20),
    (10 * MIB - 512, 2, 40, 20),
    (10 * MIB + 512, 3, 36, 12),
)


def blocks_captured(size: int, segments: int, mib: int, kept_mib: int) -> Scenario:
    @scenario(30, f"a capture of blocks of {size / KIB:g} KiB")
    def steps(subject: Subject) -> Steps:
        with subject.capture("s1") as graph:
            result_ptr, previous_ptr = subject.alloc(size, "s1"), 0
            for _ in range(5):
                copy_ptr = subject.alloc(size, "s1")
                subject.free(previous_ptr)
                previous_ptr, next_ptr = copy_ptr, subject.alloc(size, "s1")
                subject.free(result_ptr)
                result_ptr = next_ptr
        yield Check("captured", {"num_device_alloc": segments, "reserved_bytes": mib * MIB})
        subject.free(previous_ptr)
        subject.empty_cache()
        yield Check("kept by the graph", {"reserved_bytes": 0, "num_sync_all_streams": 1})
        subject.close_graph(graph)
        yield Check("without the graph", {"reserved_bytes": 0})
        subject.empty_cache()
        yield Check("emptied", now={"reserved_bytes.all.current": kept_mib * MIB})
        subject.free(result_ptr)
        subject.empty_cache()
        yield Check("without the result", now={"reserved_bytes.all.current": 0})

    return steps


@scenario(31, "captures with separate pools and with one pool")
def separate_and_shared_pools(subject: Subject) -> Steps:
    with subject.capture("s1"):
        subject.alloc(512, "s1")
    with subject.capture("s1"):
        subject.alloc(512, "s1")
    yield Check("own pools", {"reserved_bytes": 4 * MIB})
    with subject.capture("s1") as first_ptr:
        subject.alloc(512, "s1")
    with subject.capture("s1", first_ptr) as second_ptr:
        freed_ptr = subject.alloc(512, "s1")
        subject.free(freed_ptr)
    yield Check("one pool", {"reserved_bytes": 2 * MIB})
    with subject.capture("s1", second_ptr):
        second_ptr = subject.alloc(512, "s1")
    yield Check("third", {"reserved_bytes": 0}, facts={"reused": second_ptr == freed_ptr})


@scenario(32, "a graph keeps its memory")
def graph_keeps_memory(subject: Subject) -> Steps:
    with subject.capture("s1") as graph:
        subject.free(subject.alloc(BLOCK_BYTES, "s1"))
    subject.empty_cache()
    yield Check("emptied", now={"reserved_bytes.all.current": BLOCK_BYTES})
    subject.free(subject.alloc(BLOCK_BYTES, "s1"))
    yield Check("others", now={"reserved_bytes.all.current": 2 * BLOCK_BYTES})
    subject.close_graph(graph)
    subject.empty_cache()
    yield Check("released", now={"reserved_bytes.all.current": 0, "num_device_free": 2})


@scenario(33, "a capture queries no events and defers frees")
def capture_defers_frees(subject: Subject) -> Steps:
    pending_ptr = subject.alloc(BLOCK_BYTES)
    subject.keep_busy("s1")
    subject.record_use(pending_ptr, "s1")
    subject.free(pending_ptr)
    with subject.capture("s2"):
        subject.finish_work("s1")
        captured_ptr = subject.alloc(BLOCK_BYTES, "s2")
        subject.record_use(captured_ptr, "s3")
        subject.free(captured_ptr)
        subject.empty_cache()
        second_ptr = subject.alloc(BLOCK_BYTES, "s2")
        yield Check("captured", {"active": 3}, facts={"another block": second_ptr != captured_ptr})
    yield Check("ended", {"active": 0})
    subject.alloc(512)
    yield Check("later", {"active": -1}, now={"active.large_pool.current": 1})
    yield Check("the first", facts={"is free": subject.alloc(BLOCK_BYTES) == pending_ptr})


REUSE_SETTINGS = "graph_capture_record_stream_reuse:True"


@scenario(34, "reuse during a capture of two streams", settings=REUSE_SETTINGS)
def reuse_in_capture_of_two_streams(subject: Subject) -> Steps:
    with subject.capture("s1"):
        subject.enqueue_work("s1")
        subject.make_wait("s2", "s1")
        ptr = subject.alloc(BLOCK_BYTES, "s1")
        subject.record_use(ptr, "s2")
        subject.enqueue_work("s2")
        subject.free(ptr)
        early_ptr = subject.alloc(BLOCK_BYTES, "s1")
        yield Check("before they join", {"active": 2}, facts={"another block": early_ptr != ptr})
        subject.make_wait("s1", "s2")
        subject.enqueue_work("s1")
        late_ptr = subject.alloc(BLOCK_BYTES, "s1")
        yield Check("after", {"active": 0}, facts={"same block": late_ptr == ptr})


@scenario(34, "reuse during a capture of four streams", settings=REUSE_SETTINGS)
def reuse_in_capture_of_four_streams(subject: Subject) -> Steps:
    other_streams = ("s2", "s3", "s4")
    with subject.capture("s1"):
        subject.enqueue_work("s1")
        ptr = subject.alloc(BLOCK_BYTES, "s1")
        for other in other_streams:
            subject.make_wait(other, "s1")
            subject.record_use(ptr, other)
            subject.enqueue_work(other)
        subject.free(ptr)
        for number, other in enumerate(other_streams):
            subject.make_wait("s1", other)
            subject.enqueue_work("s1")
            second_ptr = subject.alloc(BLOCK_BYTES, "s1")
            reused = second_ptr == ptr
            yield Check(
                f"{other} has joined", facts={"reused after the last": reused == (number == 2)}
            )


@scenario(34, "no reuse during a capture if a stream is not captured", settings=REUSE_SETTINGS)
def no_reuse_outside_capture(subject: Subject) -> Steps:
    with subject.capture("s1"):
        subject.enqueue_work("s1")
        ptr = subject.alloc(BLOCK_BYTES, "s1")
        subject.record_use(ptr, "s2")
        subject.free(ptr)
        subject.enqueue_work("s1")
        facts = {"another block": subject.alloc(BLOCK_BYTES, "s1") != ptr}
        yield Check("captured", facts=facts)
    subject.alloc(512)
    yield Check(
        "later", blocks=[[(BLOCK_BYTES, FREE)], [(BLOCK_BYTES, "active_allocated")], SMALL_SEGMENT]
    )


SMALL_SEGMENT = [(512, "active_allocated"), (2 * MIB - 512, FREE)]

STREAM_SCENARIOS = (
    in_use_elsewhere,
    record_stream_of_same_stream,
    busy_stream_delays_its_blocks,
    free_blocks_by_stream,
    empty_cache_waits,
    three_streams_use_block,
    free_in_observer,
    *(blocks_captured(*case) for case in CAPTURE_CASES),
    separate_and_shared_pools,
    graph_keeps_memory,
    capture_defers_frees,
    reuse_in_capture_of_two_streams,
    reuse_in_capture_of_four_streams,
    no_reuse_outside_capture,
)
