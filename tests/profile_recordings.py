"""Activities of programs that never ran: from events, and of random training programs of any size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.profile.timeline import Activities, ActivityCollector
from cudakit.stacks import Frame, Stack
from cudakit.trace.events import (
    ApiCall,
    CopyRun,
    DeviceInfo,
    Event,
    FillRun,
    GraphNodeSite,
    KernelRun,
    Mark,
    RangePop,
    RangePush,
)
from cudakit.trace.kinds import Direction, EventKind, MemoryKind
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import layout, pack

PROCESS = 4321


def collect(
    events: Iterable[Event], stacks: Sequence[Stack] = ((),), *, process: int = PROCESS
) -> Activities:
    """Return events as the activities of one process."""
    strings: dict[str, int] = {"": 0}
    records = pack(list(events), lambda text: strings.setdefault(text, len(strings)))
    collector = ActivityCollector()
    collector.add(Batch(process, records, tuple(strings), stacks))
    return collector.activities()[0]


def training(
    kernels: int, *, seed: int = 0, streams: int = 3, stacks: int = 200, process: int = PROCESS
) -> Activities:
    """Return a random training program: kernels of several streams, copies, memsets and ranges."""
    rng = np.random.default_rng(seed)
    strings = ["", "NVIDIA H200", *_KERNEL_NAMES, *_FUNCTIONS]
    work = _Work.random(rng, kernels, streams, stacks)
    records = {kind: np.empty(0, layout(kind)) for kind in _KINDS}
    records[EventKind.KERNEL_RUN] = work.kernels()
    records[EventKind.COPY_RUN] = work.copies(rng)
    records[EventKind.FILL_RUN] = work.memsets()
    records[EventKind.API_CALL] = rng.permutation(work.calls())
    step_ends = work.call_end[work.is_step_end]
    records[EventKind.RANGE_PUSH], records[EventKind.RANGE_POP] = _steps(step_ends, len(strings))
    records[EventKind.DEVICE_INFO] = _devices()
    strings += [f"ProfilerStep#{number}" for number in range(len(step_ends))]
    call_stacks = [(), *(_stack(rng, number) for number in range(1, stacks))]
    return Activities(process, False, tuple(strings), tuple(call_stacks), records)


@dataclass
class _Work:
    """API calls and the GPU work of each; the work begins after its call, when its stream is free."""

    call_start: np.ndarray
    call_end: np.ndarray
    is_step_end: np.ndarray
    start: np.ndarray
    end: np.ndarray
    stream: np.ndarray
    site: np.ndarray
    rows: dict[EventKind, np.ndarray]  # the rows of each kind of work

    @staticmethod
    def random(rng: np.random.Generator, kernels: int, streams: int, stacks: int) -> _Work:
        counts = (kernels, kernels // 20, kernels // 50)
        count = sum(counts)
        is_step_end = np.arange(count) % 400 == 399
        call_start = np.cumsum(rng.integers(1500, 6000, count) + is_step_end * 400_000)
        call_end = call_start + rng.integers(800, 1500, count)
        shares = 1 / np.arange(1, streams + 1) ** 2
        stream = 7 + rng.choice(streams, count, p=shares / shares.sum())
        # Every step launches the same sequence.
        step_sites = rng.integers(min(1, stacks - 1), stacks, 400)
        site = np.resize(step_sites, count)
        # Kernels of one call site take similar times, which are multiples of 32 ns as on an H200.
        mean = rng.lognormal(8.2, 1.1, stacks)[site] * rng.normal(1, 0.02, count)
        duration = (mean.astype(np.int64) + 500) // 32 * 32
        start = np.empty(count, np.int64)
        for number in range(7, 7 + streams):
            rows = np.flatnonzero(stream == number)
            busy = np.cumsum(duration[rows]) - duration[rows]
            start[rows] = np.maximum.accumulate((call_end[rows] + 900) // 32 * 32 - busy) + busy
        kinds = (EventKind.KERNEL_RUN, EventKind.COPY_RUN, EventKind.FILL_RUN)
        parts = np.split(rng.permutation(count), np.cumsum(counts)[:-1])
        return _Work(
            call_start,
            call_end,
            is_step_end,
            start,
            start + duration,
            stream,
            site,
            {kind: np.sort(rows) for kind, rows in zip(kinds, parts, strict=True)},
        )

    def _table(self, kind: EventKind) -> np.ndarray:
        rows = self.rows[kind]
        table = np.zeros(len(rows), layout(kind))
        table["kind"] = kind
        table["stream"], table["context"] = self.stream[rows], 1
        table["device"], table["correlation"] = self.stream[rows] % 2, rows + 1
        table["start_ns"], table["end_ns"] = self.start[rows], self.end[rows]
        return table

    def kernels(self) -> np.ndarray:
        table = self._table(EventKind.KERNEL_RUN)
        rows = self.rows[EventKind.KERNEL_RUN]
        table["name"] = 2 + (self.site[rows] * 7 + rows % 3) % len(_KERNEL_NAMES)
        table["grid"] = [1, 1, 1]
        table["grid"][:, 0] = 1 << (self.site[rows] % 12)
        table["block"] = [128, 1, 1]
        table["registers"] = 16 + table["name"] % 200
        table["shared_bytes"] = (table["name"] % 4) * 16384
        return table

    def copies(self, rng: np.random.Generator) -> np.ndarray:
        table = self._table(EventKind.COPY_RUN)
        table["size_bytes"] = (table["end_ns"] - table["start_ns"]) * 20
        table["peer_device"] = -1
        table["direction"] = Direction.HOST_TO_DEVICE
        memory = [MemoryKind.PAGEABLE, MemoryKind.PINNED]
        table["source_memory"] = rng.choice(memory, len(table))
        table["destination_memory"] = MemoryKind.DEVICE
        return table

    def memsets(self) -> np.ndarray:
        table = self._table(EventKind.FILL_RUN)
        table["size_bytes"] = 4096
        return table

    def calls(self) -> np.ndarray:
        count = len(self.start)
        table = np.zeros(count, layout(EventKind.API_CALL))
        table["kind"] = EventKind.API_CALL
        table["thread"] = MAIN_THREAD + (np.arange(count) % 3 == 0)
        table["correlation"] = np.arange(count) + 1
        table["start_ns"], table["end_ns"] = self.call_start, self.call_end
        table["site"] = self.site
        for function, rows in enumerate(self.rows.values()):
            table["function"][rows] = 2 + len(_KERNEL_NAMES) + function
        return table


def _steps(step_ends: np.ndarray, first_name: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the begins and ends of one NVTX range for each step; each has its own name."""
    edges = np.concatenate([[0], step_ends + 350_000])
    push = np.zeros(len(step_ends), layout(EventKind.RANGE_PUSH))
    push["kind"], push["thread"], push["time_ns"] = EventKind.RANGE_PUSH, MAIN_THREAD, edges[:-1]
    push["name"] = first_name + np.arange(len(step_ends))
    push["seq"] = 2 * np.arange(len(step_ends)) + 1
    pop = np.zeros(len(step_ends), layout(EventKind.RANGE_POP))
    pop["kind"], pop["thread"], pop["time_ns"] = EventKind.RANGE_POP, MAIN_THREAD, edges[1:]
    pop["seq"] = push["seq"] + 1
    return push, pop


def _devices() -> np.ndarray:
    table = np.zeros(2, layout(EventKind.DEVICE_INFO))
    table["kind"], table["device"], table["name"] = EventKind.DEVICE_INFO, [0, 1], 1
    table["multiprocessors"], table["memory_bytes"] = 132, 141 << 30
    return table


MAIN_THREAD = 5000
_KERNEL_NAMES = [
    f"void at::native::vectorized_elementwise_kernel<{i}, Functor{i % 7}<float>>(int, char*)"
    if i % 3
    else f"sm90_xmma_gemm_bf16bf16_tilesize{64 << (i % 3)}x128x{i}"
    for i in range(60)
]
_FUNCTIONS = ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync"]
_KINDS = (
    EventKind.API_CALL,
    EventKind.KERNEL_RUN,
    EventKind.COPY_RUN,
    EventKind.FILL_RUN,
    EventKind.GRAPH_NODE_SITE,
    EventKind.PROFILE_WINDOW,
    EventKind.DEVICE_INFO,
    EventKind.RANGE_PUSH,
    EventKind.RANGE_POP,
    EventKind.MARK,
    EventKind.GAP,
)


def _stack(rng: np.random.Generator, number: int) -> Stack:
    layer = number % 12
    library = "/usr/lib/python3.11/site-packages/torch/nn/modules"
    return (
        Frame("forward", f"{library}/linear.py", 125 + number % 5),
        Frame("_call_impl", f"{library}/module.py", 1770),
        Frame("forward", "/home/user/model.py", 40 + number),
        Frame("_call_impl", f"{library}/module.py", 1770),
        Frame(f"block_{layer}", "/home/user/model.py", 20 + layer),
        Frame("train_step", "/home/user/train.py", 80 + int(rng.integers(3))),
        Frame("main", "/home/user/train.py", 120),
        Frame("<module>", "/home/user/train.py", 150),
    )


HOSTILE = (
    '"}],"traceEvents":[',
    "\x00\x1b[31m\u202e\ud800",
    "a\nb;c 5",
    "=1+2",
    "</script>",
    "\\",
    "% %d %s",
    "x" * 100_000,
)
TRAIN = (Frame("step", "/home/user/train.py", 41), Frame("<module>", "/home/user/train.py", 90))
CAPTURE = (
    Frame("forward", "/usr/lib/python3.11/site-packages/torch/nn/linear.py", 5),
    Frame("capture", "/home/user/graphs.py", 7),
)


def small_program() -> Activities:
    """Return one step: a launch, a pageable copy, a memset, a graph with two overlapping kernels, a wait."""
    thread = {"thread": 77, "context": 1}
    gpu = {"context": 1, "device": 0}
    return collect(
        [
            Event(DeviceInfo("NVIDIA H200", 132, 141 << 30)),
            Event(RangePush("step 0"), time_ns=1_000, thread=77, seq=1),
            Event(ApiCall("cudaLaunchKernel", 1, 1_100, 1_200), site=1, **thread),
            Event(ApiCall("cudaMemcpyAsync", 2, 1_300, 1_400), site=1, **thread),
            Event(ApiCall("cudaMemsetAsync", 3, 1_500, 1_600), site=1, **thread),
            Event(ApiCall("cudaGraphLaunch", 4, 1_700, 1_800), site=1, **thread),
            Event(ApiCall("cuStreamSynchronize", 5, 1_900, 9_000), site=1, **thread),
            Event(Mark("here"), time_ns=1_850, thread=77),
            Event(GraphNodeSite(11), site=2),
            Event(
                KernelRun(7, "gemm", 1, 2_000, 3_001, 0, (8, 2, 1), (128, 1, 1), 40, 4096), **gpu
            ),
            Event(
                CopyRun(
                    7, 3_100, 4_100, 5_000, 2, -1, Direction.HOST_TO_DEVICE, MemoryKind.PAGEABLE,
                    MemoryKind.DEVICE,
                ),
                **gpu,
            ),
            Event(FillRun(7, 4_200, 4_300, 64, 3), **gpu),
            Event(KernelRun(7, "node a", 4, 5_000, 6_000, 11), **gpu),
            Event(KernelRun(7, "node b", 4, 5_500, 6_500, 12), **gpu),
            Event(RangePop(), time_ns=10_000, thread=77, seq=99),
        ],
        stacks=((), TRAIN, CAPTURE),
    )  # fmt: skip


def hostile_program() -> Activities:
    events = []
    for number, name in enumerate(HOSTILE, 1):
        time = 1000 * number
        events += [
            Event(RangePush(name), time_ns=time, thread=5, seq=number),
            Event(ApiCall(name, number, time + 10, time + 20), thread=5, site=number),
            Event(KernelRun(7, name, number, time + 30, time + 40)),
            Event(Mark(name), time_ns=time, thread=5),
            Event(DeviceInfo(name), device=number),
        ]
    return collect(events, ((), *((Frame(name, name, 1),) for name in HOSTILE)))


def odd_times() -> Activities:
    """Return spans whose times lie: ends before starts, and the limits of 64 bits."""
    least, most = -(2**63), 2**63 - 1
    return collect(
        [
            Event(KernelRun(7, "k", 1, 100, 50)),
            Event(KernelRun(7, "k", 1, least, most)),
            Event(KernelRun(7, "k", 1, most, least)),
            Event(ApiCall("cudaLaunchKernel", 1, most, least), thread=2**32 - 1),
            Event(ApiCall("cudaLaunchKernel", 1, 0, 0), thread=1),
            Event(RangePop(), time_ns=5, thread=1),
            Event(RangePush("never ended"), time_ns=5, thread=1),
        ]
    )


def overlapping() -> Activities:
    """Return kernels of one stream, and calls and ranges of one thread, with random overlaps."""
    rng = np.random.default_rng(4)
    events = []
    for number in range(1, 400):
        start, call = (int(value) for value in rng.integers(0, 5_000, 2))
        ends = [int(value) for value in rng.integers(0, 100, 2)]
        events += [
            Event(KernelRun(int(rng.integers(3)), "k", number, start, start + ends[0])),
            Event(ApiCall("cuLaunchKernel", number, call, call + ends[1]), thread=5),
            Event(RangePush(f"range {number}"), time_ns=call, thread=5, seq=2 * number),
            Event(RangePop(), time_ns=call + ends[0], thread=5, seq=2 * number + 1),
        ]
    return collect(events)
