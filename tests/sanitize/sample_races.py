"""Build races as the engine returns them, with tables for their names and call stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cudakit.sanitize.findings import RaceCollector, RaceDecoder
from cudakit.sanitize.races import (
    Allocation,
    Confidence,
    Coverage,
    FoundRace,
    Operation,
    Race,
    RaceKind,
    SanitizeResult,
    Side,
    Sync,
    SyncKind,
)
from cudakit.stacks import BACKWARD_FRAME, Frame, Stack, call_site_index
from cudakit.trace.kinds import AccessMode, AllocationKind, EventKind, Precision, StreamFlag

MIB = 2**20
BASE = 0x7F2C_4000_0000

ADD = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"
DEMANGLED = {
    ADD: "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
}

# Numbers of the streams and of the call stacks below.
DEFAULT_STREAM, SIDE_STREAM, BLOCKING_STREAM, PER_THREAD_STREAM = 1, 7, 9, 11
PREFETCH, TRAIN_STEP, RECORD_EVENT, WAIT_EVENT, ALLOCATE, IN_BACKWARD = 1, 2, 3, 4, 5, 6

STREAMS: Mapping[int, StreamFlag] = {
    DEFAULT_STREAM: StreamFlag.LEGACY,
    SIDE_STREAM: StreamFlag.NON_BLOCKING,
    BLOCKING_STREAM: StreamFlag.BLOCKING,
    PER_THREAD_STREAM: StreamFlag.PER_THREAD,
}

_TORCH = "/opt/venv/lib/python3.12/site-packages/torch"
STACKS: Sequence[Stack] = (
    (),
    (
        Frame("prefetch", "/home/user/train/loader.py", 31),
        Frame("epoch", "/home/user/train/train.py", 58),
        Frame("<module>", "/home/user/train/train.py", 80),
    ),
    (
        Frame("forward", f"{_TORCH}/nn/modules/linear.py", 134),
        Frame("_call_impl", f"{_TORCH}/nn/modules/module.py", 1786),
        Frame("step", "/home/user/train/train.py", 44),
        Frame("epoch", "/home/user/train/train.py", 60),
        Frame("<module>", "/home/user/train/train.py", 80),
    ),
    (
        Frame("record", f"{_TORCH}/cuda/streams.py", 223),
        Frame("prefetch", "/home/user/train/loader.py", 30),
    ),
    (
        Frame("wait_event", f"{_TORCH}/cuda/streams.py", 55),
        Frame("epoch", "/home/user/train/train.py", 59),
    ),
    (
        Frame("buffers", "/home/user/train/loader.py", 12),
        Frame("<module>", "/home/user/train/train.py", 71),
    ),
    (
        Frame(BACKWARD_FRAME, "", 0),
        Frame("backward", f"{_TORCH}/autograd/__init__.py", 364),
        Frame("step", "/home/user/train/train.py", 46),
        Frame("<module>", "/home/user/train/train.py", 80),
    ),
)


def kernel(
    name: str = ADD,
    *,
    seq: int = 112,
    stream: int = DEFAULT_STREAM,
    mode: AccessMode = AccessMode.READ | AccessMode.WRITE,
    precision: Precision = Precision.ASSUMED,
    site: int = TRAIN_STEP,
    graph: int = 0,
    node: int = 0,
) -> Operation:
    return _operation(
        EventKind.LAUNCH, name, seq, stream, mode, precision, site, 60 * MIB, graph, node
    )


def exact_operation(
    kind: EventKind = EventKind.COPY,
    *,
    seq: int = 107,
    stream: int = SIDE_STREAM,
    mode: AccessMode = AccessMode.WRITE,
    site: int = PREFETCH,
    graph: int = 0,
    node: int = 0,
) -> Operation:
    return _operation(kind, "", seq, stream, mode, Precision.EXACT, site, 4 * MIB, graph, node)


def _operation(
    kind: EventKind,
    name: str,
    seq: int,
    stream: int,
    mode: AccessMode,
    precision: Precision,
    site: int,
    size_bytes: int,
    graph: int,
    node: int,
) -> Operation:
    lo = BASE + 4 * MIB
    return Operation(
        seq=seq,
        kind=kind,
        name=name,
        stream=stream,
        context=1,
        device=0,
        thread=140_001,
        site=site,
        mode=mode,
        precision=precision,
        lo=lo,
        hi=lo + size_bytes,
        graph=graph,
        node=node,
    )


EVENT = Sync(
    SyncKind.EVENT,
    recorded_seq=101,
    recorded_site=RECORD_EVENT,
    waited_seq=104,
    waited_site=WAIT_EVENT,
)
MEMORY = Allocation(BASE, 64 * MIB, AllocationKind.SYNC, ALLOCATE, seq=12)


def race(
    kind: RaceKind = RaceKind.READ_AFTER_WRITE,
    *,
    confidence: Confidence = Confidence.LIKELY,
    current: Operation | None = None,
    previous: Operation | None = None,
    allocation: Allocation | None = MEMORY,
    last_sync: Sync | None = EVENT,
    approximate: bool = False,
) -> Race:
    """Return a race; by default a kernel reads a prefetched batch too early."""
    current, previous = current or kernel(), previous or exact_operation()
    lo, hi = max(current.lo, previous.lo), min(current.hi, previous.hi)
    return Race(kind, confidence, lo, hi, current, previous, allocation, last_sync, approximate)


def demangle(name: str) -> str:
    return DEMANGLED.get(name, name)


def race_decoder(process: int = 4242) -> RaceDecoder:
    return RaceDecoder(process, frames, STREAMS, demangle)


def frames(number: int) -> Stack:
    return STACKS[number]


def found_race(made_race: Race | None = None) -> FoundRace:
    return race_decoder().decode(made_race or race())


def side(operation: Operation) -> Side:
    return race_decoder().side(operation)


def report_of(
    *races: Race, report: RaceCollector | None = None, process: int = 4242
) -> RaceCollector:
    """Return a report with the races of one process, or add them to a report."""
    report = report or RaceCollector(demangle=demangle)
    report.add(process, races, stacks=STACKS, flag_by_stream=STREAMS)
    return report


def result_of(
    report: RaceCollector, *, simulated: bool = False, stopped: bool = False
) -> SanitizeResult:
    coverage = Coverage(
        launches=19_000,
        launches_exact=18_990,
        launches_assumed=10,
        copies=1_200,
        fills=12,
        accesses_exact=38_000,
        accesses_assumed=24,
        arenas_bytes=256 * MIB,
    )
    return report.result(
        exit_status=0, coverage={4242: coverage}, simulated=simulated, stopped=stopped
    )


def stack_site(number: int) -> int:
    return call_site_index(frames(number))
