"""Activities of programs that never ran: from events, and of random training programs of any size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.core.profile.activities import Activities, ActivityCollector
from cudakit.trace.events import Event
from cudakit.trace.kinds import Direction, EventKind, MemoryKind
from cudakit.trace.layout import layout, pack
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import Frame, Stack

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
