"""Measure the engine of ``cudakit run --sanitize``: time per launch and per range, and its memory.

    python scripts/bench_sanitize_engine.py [--quick] [--log FILE]

Analyzes generated traces, and prints the CPU times of the compiled and of the Python shadow memory:

* small launches with three exact ranges or three assumed pointers, in one stream or in two: these alternate
  every eight launches, with an event record and a wait. Lowest of seven rounds;
* a log like that of LSTM training: 12,489 launches with 2.3 million ranges, most of them of gathers from an
  embedding. Includes reading the log. Python analyzes the first tenth;
* 100,000 launches of 200 ranges each, which repeat as in training, on four streams;
* graph launches of 50 nodes with 40 ranges each;
* launches of a graph of nine nodes with two ranges each, which use a template. Before every 20th launch all
  nodes are changed, and the launch is recorded. In a second trace, each launch has an event, a wait and a
  host function, as those of XLA. Lowest of seven rounds;
* the resident memory during a million launches. The host waits for them regularly, as in training.

``--log`` measures a log of ``run --log``, too. ``--quick`` skips the two longest traces. Exits with 1 if a
limit is exceeded: 5 us for a small launch in one stream, 2 s for the log, 60 s for 100,000 launches, 8 MiB of
growth.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.sanitize.engine import Engine
from cudakit.sanitize.records import ReorderBuffer
from cudakit.sanitize.templates import TemplateAccesses
from cudakit.trace.events import (
    Access,
    Accessed,
    Alloc,
    Event,
    EventBody,
    EventRecord,
    GraphEdge,
    GraphLaunch,
    GraphNode,
    HostCall,
    Launch,
    StreamCreate,
    StreamSync,
    StreamWait,
    Template,
)
from cudakit.trace.kinds import (
    AccessMode,
    EventKind,
    HostCallPhase,
    NodeType,
    Precision,
    StreamFlag,
)
from cudakit.trace.run_log import LogReader, LogWriter, Outcome
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import RECORD, Records, concatenate_records, layout, pack

Numbers: TypeAlias = npt.NDArray[np.int64]

ROUNDS = 7
SMALL_LAUNCHES = 20_000
BATCH_RECORDS = 8192
BUFFERS = 96
BUFFER_BYTES = 1 << 20
BASE = 0x7F00_0000_0000
MAX_SMALL_LAUNCH_SECONDS = 5e-6
LSTM_LAUNCHES, LSTM_RANGES, MAX_LSTM_SECONDS = 12_489, 2_300_000, 2.0
MANY_LAUNCHES, RANGES_PER_LAUNCH, MAX_MANY_SECONDS = 100_000, 200, 60.0
GRAPH_LAUNCHES, GRAPH_NODES, RANGES_PER_NODE = 200, 50, 40
COMMAND_LAUNCHES, COMMAND_NODES, COMMANDS_PER_CHANGE = 5000, 9, 20
MEMORY_LAUNCHES, MAX_GROWTH_BYTES = 1_000_000, 8 << 20
READ, WRITE = AccessMode.READ, AccessMode.WRITE

STRINGS = ["", "kernel"]


# --- traces


def records_of(calls: Iterable[list[EventBody]], *, first_seq: int = 1) -> Records:
    events = [
        Event(body, seq=seq, thread=1, context=1, site=seq % 50)
        for seq, bodies in enumerate(calls, first_seq)
        for body in bodies
    ]
    return pack(events, lambda text: STRINGS.index(text))


def initial_records() -> Records:
    streams = [[StreamCreate(1, StreamFlag.LEGACY)]]
    streams += [[StreamCreate(number, StreamFlag.NON_BLOCKING)] for number in (2, 3, 4, 5)]
    return records_of([*streams, [Alloc(BASE, 1 << 32)]])


def launch_records(
    first_seq: int, streams: Numbers, counts: Numbers, lo: Numbers, hi: Numbers, modes: Numbers
) -> Records:
    """Return launches with ``counts`` exact ranges each, and ``lo``, ``hi`` and ``modes`` of all ranges."""
    launches = np.cumsum(counts + 1) - counts - 1  # index of each launch
    records = np.zeros(len(launches) + len(lo), RECORD)
    per_launch = counts + 1
    records["seq"] = np.repeat(np.arange(len(launches)) + first_seq, per_launch)
    records["stream"] = np.repeat(streams, per_launch)
    records["site"] = np.repeat(np.arange(len(launches)) % 50, per_launch)
    records["context"] = records["thread"] = 1
    records["kind"] = EventKind.ACCESS
    records["kind"][launches] = EventKind.LAUNCH
    records.view(layout(EventKind.LAUNCH))["name"][launches] = 1
    is_access = records["kind"] == EventKind.ACCESS
    accesses = records.view(layout(EventKind.ACCESS))
    columns = {"lo": lo, "hi": hi, "mode": modes, "precision": Precision.EXACT}
    for field, values in columns.items():
        accesses[field][is_access] = values
    return records


def small_launch(stream: int, number: int, precision: Precision) -> list[EventBody]:
    """Return a launch that reads two buffers and writes a third. The buffers repeat, as in training."""
    bodies: list[EventBody] = [Launch(stream, "kernel")]
    for index in range(3):
        start = BASE + (number * 3 + index) % BUFFERS * BUFFER_BYTES
        if precision is Precision.ASSUMED:
            bodies.append(Access(start, BASE + BUFFERS * BUFFER_BYTES, READ | WRITE, precision))
        else:
            bodies.append(Access(start, start + BUFFER_BYTES, WRITE if index == 2 else READ))
    return bodies


def one_stream(precision: Precision) -> Iterator[list[EventBody]]:
    return (small_launch(1, number, precision) for number in range(SMALL_LAUNCHES))


def two_streams(precision: Precision) -> Iterator[list[EventBody]]:
    """Yield launches that change the stream after every eight, with an event record and a wait between."""
    for number in range(SMALL_LAUNCHES):
        stream, previous_stream = (1, 2) if number // 8 % 2 else (2, 1)
        if number % 8 == 0:
            yield [EventRecord(number + 1, previous_stream)]
            yield [StreamWait(stream, number + 1)]
        yield small_launch(stream, number, precision)


def lstm_batches() -> Iterator[Records]:
    """Yield a trace in which a few launches gather thousands of rows, and the others access tensors.

    The ranges of a launch are in the order of their addresses, as the recorder writes them.
    """
    random = np.random.default_rng(1)
    yield initial_records()
    seq, ranges = 100, 0
    for begin in range(0, LSTM_LAUNCHES, 100):
        launch_count = min(100, LSTM_LAUNCHES - begin)
        counts = random.integers(3, 30, launch_count)
        remaining = LSTM_RANGES - ranges - int(counts.sum())
        per_batch = max(0, remaining * launch_count // (LSTM_LAUNCHES - begin))
        counts[:4] += per_batch // 4
        ranges += int(counts.sum())
        is_gather = np.repeat(np.arange(launch_count) < 4, counts)
        rows = random.integers(0, 1 << 21, len(is_gather))
        lo = BASE + np.where(is_gather, rows * 256, (1 << 30) + rows % 4096 * (1 << 16))
        lo = lo[np.lexsort((lo, np.repeat(np.arange(launch_count), counts)))]
        is_gather = lo < BASE + (1 << 30)
        hi = lo + np.where(is_gather, random.choice([8, 32, 64, 128, 256], len(lo)), 1 << 16)
        modes = np.where(random.integers(0, 4, len(lo)) | is_gather, READ, WRITE)
        yield launch_records(seq, np.full(launch_count, 1), counts, lo, hi, modes)
        seq += launch_count
        if begin % 400 == 300:  # real training waits as often
            yield records_of([[StreamSync(1)]], first_seq=seq)
            seq += 1


def repeated_batches(launch_count: int, range_count: int, *, sync_every: int) -> Iterator[Records]:
    """Yield launches on four streams, each of which accesses the same ranges again and again."""
    yield initial_records()
    seq = 100
    batch = max(1, BATCH_RECORDS // (range_count + 1))
    sets = 64
    starts = BASE + np.arange(sets * range_count).reshape(sets, range_count) * 256
    for begin in range(0, launch_count, batch):
        numbers = np.arange(begin, min(begin + batch, launch_count))
        lo = starts[numbers % sets].reshape(-1)
        modes = np.tile(np.where(np.arange(range_count) % 4, READ, WRITE), len(numbers))
        counts = np.full(len(numbers), range_count)
        yield launch_records(seq, numbers % 4 + 2, counts, lo, lo + 128, modes)
        seq += len(numbers)
        if begin // batch % sync_every == sync_every - 1:
            yield records_of([[StreamSync(stream)] for stream in (2, 3, 4, 5)], first_seq=seq)
            seq += 4


def graph_batches() -> Iterator[Records]:
    yield initial_records()
    calls: list[list[EventBody]] = []
    for node in range(1, GRAPH_NODES + 1):
        start = BASE + node * (1 << 20)
        accesses = [
            Access(start + i * 512, start + i * 512 + 256, WRITE if i % 4 == 0 else READ, node=node)
            for i in range(RANGES_PER_NODE)
        ]
        calls.append([GraphNode(1, node, NodeType.LAUNCH), *accesses])
    calls += [[GraphEdge(1, node, node + 1)] for node in range(1, GRAPH_NODES)]
    calls += [[GraphLaunch(2, 1, 1)] for _ in range(GRAPH_LAUNCHES)]
    yield records_of(calls, first_seq=100)


def command_buffer_batches(*, with_waits: bool) -> Iterator[Records]:
    """Yield a trace with graph launches; ``with_waits`` adds an event, a wait and a host function to each."""
    yield initial_records()
    edges: list[list[EventBody]] = [
        [GraphEdge(1, node, node + 1)] for node in range(1, COMMAND_NODES)
    ]
    calls = edges
    for number in range(COMMAND_LAUNCHES):
        launch: list[EventBody] = [
            GraphLaunch(2, 1, 1, template_id=1 + number // COMMANDS_PER_CHANGE)
        ]
        if number % COMMANDS_PER_CHANGE == 0:
            calls += [
                [GraphNode(1, node, NodeType.LAUNCH, "kernel")]
                for node in range(1, COMMAND_NODES + 1)
            ]
            first = BASE + number % 2 * BUFFER_BYTES
            accesses = [
                Access(first + place * 512, first + place * 512 + 256, mode, node=node)
                for node in range(1, COMMAND_NODES + 1)
                for place, mode in ((node - 1, READ), (node, WRITE))
            ]
            accessed = [Accessed(node) for node in range(1, COMMAND_NODES + 1)]
            template = Template(1 + number // COMMANDS_PER_CHANGE)
            launch = [GraphLaunch(2, 1, 1), *accesses, *accessed, template]
        calls.append(launch)
        if with_waits:
            calls += [
                [EventRecord(1, 2)],
                [StreamWait(3, 1)],
                [HostCall(3, HostCallPhase.BEGIN)],
                [HostCall(3, HostCallPhase.END)],
            ]
    yield records_of(calls, first_seq=100)


# --- measurements


def engine_seconds(batches: Iterable[Records], *, native: bool) -> tuple[float, Engine]:
    """Return the CPU time in which an engine analyzes a trace, fed in batches, and the engine."""
    engine, cpu_seconds = Engine(native=native), 0.0
    gc.collect()
    for records in batches:
        start = time.process_time()
        races = engine.feed(records, STRINGS)
        cpu_seconds += time.process_time() - start
        if races:
            raise SystemExit(f"race reported in a trace without races: {races[0]}")
    return cpu_seconds, engine


def measure_command_buffers(*, with_waits: bool) -> None:
    batches = list(command_buffer_batches(with_waits=with_waits))

    def seconds(*, native: bool) -> float:
        engine, templates = Engine(native=native), TemplateAccesses()
        start = time.process_time()
        for batch in batches:
            records = templates.insert(batch, engine.coverage)
            if engine.feed(records, STRINGS, graph_rows=templates.graph_rows):
                raise SystemExit("race reported in a trace without races")
        return time.process_time() - start

    fastest = min(seconds(native=True) for _ in range(ROUNDS))
    python = min(seconds(native=False) for _ in range(2))
    print(
        f"graph launches of {COMMAND_NODES} nodes{' with waits' if with_waits else ''}:"
        f" {fastest / COMMAND_LAUNCHES * 1e6:.1f} us per launch,"
        f" Python {python / COMMAND_LAUNCHES * 1e6:.1f} ({python / fastest:.1f} times)"
    )


def split(records: Records) -> list[Records]:
    return [records[i : i + BATCH_RECORDS] for i in range(0, len(records), BATCH_RECORDS)]


def measure_small(
    name: str, program: Callable[[Precision], Iterator[list[EventBody]]], precision: Precision
) -> float:
    batches = [initial_records(), *split(records_of(program(precision), first_seq=100))]
    seconds = min(engine_seconds(batches, native=True)[0] for _ in range(ROUNDS))
    python_seconds = min(engine_seconds(batches, native=False)[0] for _ in range(2))
    print(
        f"{name:11} {precision.name.lower():8} {seconds / SMALL_LAUNCHES * 1e6:6.2f} us per launch,"
        f" Python {python_seconds / SMALL_LAUNCHES * 1e6:6.2f} ({python_seconds / seconds:.1f} times)"
    )
    return seconds / SMALL_LAUNCHES


def log_seconds(path: Path, *, native: bool, max_records: int | None = None) -> tuple[float, int]:
    """Return the CPU time for reading and analyzing a log, or its first records, and their number."""
    engines: dict[Any, tuple[Engine, ReorderBuffer, TemplateAccesses]] = {}
    record_count, start = 0, time.process_time()
    with LogReader(path) as log:
        for batch in log.batches():
            key = batch.process, batch.trace_number
            if key not in engines:
                engines[key] = Engine(native=native), ReorderBuffer(), TemplateAccesses()
            engine, buffer, templates = engines[key]
            records = templates.insert(buffer.feed(batch.records), engine.coverage)
            graph_rows = templates.graph_rows
            engine.feed(records, batch.strings, templates.possible_accesses, graph_rows)
            record_count += len(batch.records)
            if max_records is not None and record_count >= max_records:
                break
    return time.process_time() - start, record_count


def measure_log(name: str, path: Path) -> float:
    seconds, record_count = min(log_seconds(path, native=True) for _ in range(3))
    python_seconds, python_count = log_seconds(path, native=False, max_records=record_count // 10)
    part_seconds, _ = log_seconds(path, native=True, max_records=python_count)
    print(
        f"{name}: {record_count:,} records in {seconds:.2f} s,"
        f" {seconds / record_count * 1e6:.2f} us per record;"
        f" the first {python_count:,} in {part_seconds:.2f} s,"
        f" Python {python_seconds:.2f} s ({python_seconds / part_seconds:.1f} times)"
    )
    return seconds


def measure_lstm() -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lstm.log"
        with path.open("wb") as file:
            writer = LogWriter(file)
            for records in split(concatenate_records(list(lstm_batches()))):
                writer.add(Batch(1, records, STRINGS, [()], 0, False))
            writer.finish(Outcome())
        return measure_log("LSTM shape", path)


def measure_many() -> float:
    batches = repeated_batches(MANY_LAUNCHES, RANGES_PER_LAUNCH, sync_every=20)
    seconds, engine = engine_seconds(batches, native=True)
    ranges = MANY_LAUNCHES * RANGES_PER_LAUNCH
    print(
        f"{engine.coverage.launches:,} launches of {RANGES_PER_LAUNCH} ranges: {seconds:.1f} s,"
        f" {seconds / ranges * 1e6:.2f} us per range"
    )
    return seconds


def measure_graphs() -> None:
    seconds = min(engine_seconds(graph_batches(), native=True)[0] for _ in range(3))
    python_seconds, _ = engine_seconds(graph_batches(), native=False)
    nodes = GRAPH_LAUNCHES * GRAPH_NODES
    print(
        f"graph nodes of {RANGES_PER_NODE} ranges: {seconds / nodes * 1e6:.2f} us per node,"
        f" Python {python_seconds / nodes * 1e6:.2f} ({python_seconds / seconds:.1f} times)"
    )


def resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10


def growth_bytes() -> int:
    """Return the growth of the resident memory from the first tenth of the launches to the end."""
    engine, launches, first_bytes, peak_bytes = Engine(), 0, 0, 0
    for records in repeated_batches(MEMORY_LAUNCHES, 8, sync_every=40):
        engine.feed(records, STRINGS)
        launches = engine.coverage.launches
        if launches <= MEMORY_LAUNCHES // 10:
            first_bytes = max(first_bytes, resident_bytes())
        peak_bytes = max(peak_bytes, resident_bytes())
    growth = peak_bytes - first_bytes
    print(
        f"{launches:,} launches of 8 ranges: resident memory {peak_bytes / 1e6:.0f} MB,"
        f" growth {growth / 1e6:+.2f} MB after the first tenth"
    )
    return growth


def processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--log", type=Path)
    arguments = parser.parse_args()
    print(f"{processor_name()}, Python {platform.python_version()}, numpy {np.__version__}")
    growth = 0 if arguments.quick else growth_bytes()  # first, while the process is small
    precisions = Precision.EXACT, Precision.ASSUMED
    small = max(measure_small("one stream", one_stream, precision) for precision in precisions)
    for precision in precisions:
        measure_small("two streams", two_streams, precision)
    measure_graphs()
    measure_command_buffers(with_waits=False)
    measure_command_buffers(with_waits=True)
    lstm = measure_lstm()
    if arguments.log:
        measure_log(arguments.log.name, arguments.log)
    many = 0.0 if arguments.quick else measure_many()
    limits = (
        (
            "small launch",
            small,
            MAX_SMALL_LAUNCH_SECONDS,
            f"{MAX_SMALL_LAUNCH_SECONDS * 1e6:.0f} us",
        ),
        ("LSTM shape", lstm, MAX_LSTM_SECONDS, f"{MAX_LSTM_SECONDS:.0f} s"),
        ("100,000 launches", many, MAX_MANY_SECONDS, f"{MAX_MANY_SECONDS:.0f} s"),
        ("growth", growth, MAX_GROWTH_BYTES, f"{MAX_GROWTH_BYTES >> 20} MiB"),
    )
    for name, value, limit, text in limits:
        print(f"limit of {name} {text}: {'ok' if value <= limit else 'EXCEEDED'}")
    return int(any(value > limit for _, value, limit, _ in limits))


if __name__ == "__main__":
    sys.exit(main())
