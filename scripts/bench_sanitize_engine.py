"""Measure the engine of ``cudakit run --sanitize``: time per launch, and memory over a million reads.

    python scripts/bench_sanitize_engine.py

Feeds generated traces in batches, as the spool does, and prints the lowest CPU time of seven rounds. A trace
has launches with three exact ranges or three assumed pointers, in one stream or in two: these alternate every
eight launches, with an event record and a wait. Then prints the engine's memory while one buffer is read a
million times. Exits with 1 if a launch in one stream takes more than 5 µs, or if the memory grows.
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator

from cudakit.core.sanitize.engine import Engine
from cudakit.trace.events import (
    Access,
    Alloc,
    Event,
    EventBody,
    EventRecord,
    Launch,
    StreamCreate,
    StreamWait,
)
from cudakit.trace.kinds import AccessMode, Precision, StreamFlag
from cudakit.trace.layout import Records, pack

ROUNDS = 7
LAUNCHES = 20_000
READS = 1_000_000
BATCH_RECORDS = 8192
RANGES_PER_LAUNCH = 3
BUFFERS = 96
BUFFER_BYTES = 1 << 20
BASE = 0x7F00_0000_0000
MAX_LAUNCH_SECONDS = 5e-6
MAX_GROWTH_BYTES = 64 << 10

STRINGS = ["", "kernel"]


def records_of(calls: Iterator[list[EventBody]], *, first_seq: int = 1) -> Records:
    events = [
        Event(body, seq=seq, thread=1, context=1, site=seq % 50)
        for seq, bodies in enumerate(calls, first_seq)
        for body in bodies
    ]
    return pack(events, lambda text: STRINGS.index(text))


def initial_calls() -> Iterator[list[EventBody]]:
    yield [StreamCreate(1, StreamFlag.LEGACY)]
    yield [StreamCreate(2, StreamFlag.NON_BLOCKING)]
    yield [Alloc(BASE, BUFFERS * BUFFER_BYTES)]


def launch(stream: int, number: int, precision: Precision) -> list[EventBody]:
    """Return a launch that reads two buffers and writes a third. The buffers repeat, as in training."""
    bodies: list[EventBody] = [Launch(stream, "kernel")]
    for index in range(RANGES_PER_LAUNCH):
        start = BASE + (number * RANGES_PER_LAUNCH + index) % BUFFERS * BUFFER_BYTES
        if precision is Precision.ASSUMED:
            bodies.append(
                Access(
                    start,
                    BASE + BUFFERS * BUFFER_BYTES,
                    AccessMode.READ | AccessMode.WRITE,
                    precision,
                )
            )
        else:
            bodies.append(
                Access(
                    start, start + BUFFER_BYTES, AccessMode.WRITE if index == 2 else AccessMode.READ
                )
            )
    return bodies


def one_stream(precision: Precision) -> Iterator[list[EventBody]]:
    return (launch(1, number, precision) for number in range(LAUNCHES))


def two_streams(precision: Precision) -> Iterator[list[EventBody]]:
    """Yield launches that change the stream after every eight, with an event record and a wait between."""
    for number in range(LAUNCHES):
        stream, previous_stream = (1, 2) if number // 8 % 2 else (2, 1)
        if number % 8 == 0:
            yield [EventRecord(number + 1, previous_stream)]
            yield [StreamWait(stream, number + 1)]
        yield launch(stream, number, precision)


def engine_seconds(records: Records) -> float:
    """Return the CPU time in which an engine analyzes a trace, fed in batches."""
    engine = Engine()
    engine.feed(records_of(initial_calls()), STRINGS)
    gc.collect()
    start = time.process_time()
    races = [
        race
        for begin in range(0, len(records), BATCH_RECORDS)
        for race in engine.feed(records[begin : begin + BATCH_RECORDS], STRINGS)
    ]
    cpu_seconds = time.process_time() - start
    if races:
        raise SystemExit(f"race reported in a trace without races: {races[0]}")
    return cpu_seconds


def measure(
    name: str, program: Callable[[Precision], Iterator[list[EventBody]]], precision: Precision
) -> float:
    records = records_of(program(precision), first_seq=10)
    cpu_seconds = min(engine_seconds(records) for _ in range(ROUNDS))
    per_launch, per_record = cpu_seconds / LAUNCHES, cpu_seconds / len(records)
    print(
        f"{name:11} {precision.name.lower():8} {per_launch * 1e6:6.2f} µs per launch"
        f" {per_record * 1e6:6.2f} µs per record"
    )
    return per_launch


def growth_bytes() -> int:
    """Return the growth of the engine's memory from the first to the last tenth of the reads."""
    engine = Engine()
    engine.feed(records_of(initial_calls()), STRINGS)
    bodies: list[EventBody] = [
        Launch(1, "kernel"),
        Access(BASE, BASE + BUFFER_BYTES, AccessMode.READ),
    ]
    records = records_of((bodies for _ in range(BATCH_RECORDS // 2)), first_seq=10)
    memory_bytes: list[int] = []
    tracemalloc.start()
    for _ in range(READS // (BATCH_RECORDS // 2)):
        engine.feed(records, STRINGS)
        records["seq"] += len(records) // 2
        memory_bytes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    tenth = len(memory_bytes) // 10
    growth = max(memory_bytes[-tenth:]) - max(memory_bytes[:tenth])
    print(
        f"{READS} reads of one buffer: {max(memory_bytes) / 1e3:.0f} kB used, growth {growth / 1e3:+.1f} kB"
    )
    return growth


def main() -> int:
    precisions = Precision.EXACT, Precision.ASSUMED
    slowest = max(measure("one stream", one_stream, precision) for precision in precisions)
    for precision in precisions:
        measure("two streams", two_streams, precision)
    is_fast, is_constant = slowest <= MAX_LAUNCH_SECONDS, growth_bytes() <= MAX_GROWTH_BYTES
    print(
        f"limit in one stream {MAX_LAUNCH_SECONDS * 1e6:.0f} µs: {'ok' if is_fast else 'EXCEEDED'}"
    )
    print(f"limit of growth {MAX_GROWTH_BYTES >> 10} KiB: {'ok' if is_constant else 'EXCEEDED'}")
    return 0 if is_fast and is_constant else 1


if __name__ == "__main__":
    sys.exit(main())
