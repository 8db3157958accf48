"""Measure the engine of ``cudakit run --sanitize``: time per launch, and memory over a million reads.

    python scripts/bench_sanitize_engine.py

Feeds synthetic traces in batches, as the spool does, and prints the least CPU time of seven rounds: launches
with three exact ranges or three assumed pointers, in one stream, and in two streams that alternate every
eight launches with an event record and a wait. Then prints the engine's memory while one buffer is read a
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
BATCH = 8192
RANGES = 3
BUFFERS = 96
BUFFER_BYTES = 1 << 20
BASE = 0x7F00_0000_0000
MOST_SECONDS = 5e-6
MOST_GROWTH_BYTES = 64 << 10

STRINGS = ["", "kernel"]


def records_of(calls: Iterator[list[EventBody]], *, first_seq: int = 1) -> Records:
    events = [
        Event(body, seq=seq, thread=1, context=1, site=seq % 50)
        for seq, bodies in enumerate(calls, first_seq)
        for body in bodies
    ]
    return pack(events, lambda text: STRINGS.index(text))


def opening() -> Iterator[list[EventBody]]:
    yield [StreamCreate(1, StreamFlag.LEGACY)]
    yield [StreamCreate(2, StreamFlag.NON_BLOCKING)]
    yield [Alloc(BASE, BUFFERS * BUFFER_BYTES)]


def launch(stream: int, number: int, known: Precision) -> list[EventBody]:
    """Read two buffers and write a third, repeating the same buffers as a training step does."""
    bodies: list[EventBody] = [Launch(stream, "kernel")]
    for index in range(RANGES):
        lo = BASE + (number * RANGES + index) % BUFFERS * BUFFER_BYTES
        if known is Precision.ASSUMED:
            bodies.append(
                Access(lo, BASE + BUFFERS * BUFFER_BYTES, AccessMode.READ | AccessMode.WRITE, known)
            )
        else:
            bodies.append(
                Access(lo, lo + BUFFER_BYTES, AccessMode.WRITE if index == 2 else AccessMode.READ)
            )
    return bodies


def one_stream(known: Precision) -> Iterator[list[EventBody]]:
    return (launch(1, number, known) for number in range(LAUNCHES))


def two_streams(known: Precision) -> Iterator[list[EventBody]]:
    """Change the stream after every eight launches, with an event and a wait in between."""
    for number in range(LAUNCHES):
        stream, other = (1, 2) if number // 8 % 2 else (2, 1)
        if number % 8 == 0:
            yield [EventRecord(number + 1, other)]
            yield [StreamWait(stream, number + 1)]
        yield launch(stream, number, known)


def seconds(records: Records) -> float:
    """Return the CPU time of an engine for a trace, fed in batches."""
    engine = Engine()
    engine.feed(records_of(opening()), STRINGS)
    gc.collect()
    start = time.process_time()
    races = [
        race
        for begin in range(0, len(records), BATCH)
        for race in engine.feed(records[begin : begin + BATCH], STRINGS)
    ]
    spent = time.process_time() - start
    if races:
        raise SystemExit(f"race reported in a trace without races: {races[0]}")
    return spent


def measure(
    name: str, program: Callable[[Precision], Iterator[list[EventBody]]], known: Precision
) -> float:
    records = records_of(program(known), first_seq=10)
    spent = min(seconds(records) for _ in range(ROUNDS))
    per_launch, per_record = spent / LAUNCHES, spent / len(records)
    print(
        f"{name:11} {known.name.lower():8} {per_launch * 1e6:6.2f} µs per launch"
        f" {per_record * 1e6:6.2f} µs per record"
    )
    return per_launch


def growth_bytes() -> int:
    """Return the growth of the engine's memory from the first to the last tenth of the reads."""
    engine = Engine()
    engine.feed(records_of(opening()), STRINGS)
    bodies: list[EventBody] = [
        Launch(1, "kernel"),
        Access(BASE, BASE + BUFFER_BYTES, AccessMode.READ),
    ]
    records = records_of((bodies for _ in range(BATCH // 2)), first_seq=10)
    held: list[int] = []
    tracemalloc.start()
    for _ in range(READS // (BATCH // 2)):
        engine.feed(records, STRINGS)
        records["seq"] += len(records) // 2
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    tenth = len(held) // 10
    grown = max(held[-tenth:]) - max(held[:tenth])
    print(
        f"{READS} reads of one buffer: {max(held) / 1e3:.0f} kB used, growth {grown / 1e3:+.1f} kB"
    )
    return grown


def main() -> int:
    precisions = Precision.EXACT, Precision.ASSUMED
    slowest = max(measure("one stream", one_stream, precision) for precision in precisions)
    for precision in precisions:
        measure("two streams", two_streams, precision)
    fast, flat = slowest <= MOST_SECONDS, growth_bytes() <= MOST_GROWTH_BYTES
    print(f"limit in one stream {MOST_SECONDS * 1e6:.0f} µs: {'ok' if fast else 'EXCEEDED'}")
    print(f"limit of growth {MOST_GROWTH_BYTES >> 10} KiB: {'ok' if flat else 'EXCEEDED'}")
    return 0 if fast and flat else 1


if __name__ == "__main__":
    sys.exit(main())
