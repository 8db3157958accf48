"""Generate traces of programs whose schedule is known: a host thread launches work, and devices run it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cudakit.profile.timeline import Activities, ActivityCollector
from cudakit.stacks import Frame, Stack
from cudakit.trace.events import (
    ApiCall,
    Collective,
    CopyRun,
    DeviceInfo,
    Event,
    EventBody,
    FillRun,
    Gap,
    GraphNodeSite,
    KernelRun,
    Mark,
    RangePop,
    RangePush,
)
from cudakit.trace.kinds import CollectiveFunction, Direction, MemoryKind, NcclDatatype
from cudakit.trace.run_log import LogWriter, Outcome
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import pack

US = 1_000
MS = 1_000_000


class Program:
    """A program on a device without latency: work starts when its stream and its launch permit.

    ``now_ns`` is the time of the host. Every launch takes the host ``launch_ns``, and ends before its work
    starts. ``site`` is a line of train.py; 0 is an unknown call stack.
    """

    def __init__(
        self,
        *,
        process: int = 100,
        thread: int = 1,
        launch_ns: int = 5 * US,
        gpu: str = "NVIDIA H200",
    ) -> None:
        self.process = process
        self.thread = thread
        self.launch_ns = launch_ns
        self.now_ns = 0
        self.events: list[Event] = []
        self.stream_end_ns: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._stacks: dict[Stack, int] = {(): 0}
        self._correlation = 0
        self.emit(DeviceInfo(gpu, 132, 141 << 30))

    # --- the host

    def host(self, duration_ns: int) -> None:
        """Add time in which the host works outside of CUDA."""
        self.now_ns += duration_ns

    def call(self, function: str, duration_ns: int, *, line: int = 0) -> int:
        """Make an API call; return its correlation."""
        self._correlation += 1
        start = self.now_ns
        self.now_ns += duration_ns
        body = ApiCall(function, self._correlation, start, self.now_ns)
        self.emit(body, line=line)
        return self._correlation

    @contextmanager
    def range(self, name: str, domain: str = "") -> Iterator[None]:
        """Open an NVTX range."""
        self.emit(RangePush(name, domain))
        yield
        self.emit(RangePop(domain))

    def mark(self, name: str, domain: str = "") -> None:
        """Set an NVTX mark."""
        self.emit(Mark(name, domain))

    def lose(self, reason: str, count: int) -> None:
        """Record that events were lost."""
        self.emit(Gap(reason, count))

    # --- work of the device

    def kernel(
        self, name: str, duration_ns: int, *, stream: int = 1, line: int = 0, blocks: int = 1000,
        device: int = 0, after_ns: int = 0,
    ) -> int:  # fmt: skip
        """Launch a kernel; return the time of its end. It starts no earlier than ``after_ns``."""
        correlation = self.call("cudaLaunchKernel", self.launch_ns, line=line)
        start, end = self._run(stream, device, duration_ns, after_ns)
        body = KernelRun(stream, name, correlation, start, end, grid=(blocks, 1, 1))
        self.emit(body, device=device)
        return end

    def collective(
        self, name: str, duration_ns: int, function: CollectiveFunction, element_count: int,
        *, communicator: int = 1,
    ) -> None:  # fmt: skip
        """Launch a kernel of NCCL that performs one operation on 32-bit floats."""
        self.kernel(name, duration_ns)
        launch = self.events[-2]
        body = Collective(
            1, 0, 0, element_count, communicator, function=function, datatype=NcclDatatype.FLOAT32
        )
        self.events.append(replace(launch, body=body))

    def kernel_without_call(self, name: str, duration_ns: int) -> None:
        """Launch a kernel whose API call is not recorded."""
        self.kernel(name, duration_ns)
        del self.events[-2]

    def graph(self, names: list[str], duration_ns: int, *, stream: int = 1, line: int = 0) -> None:
        """Launch a graph of kernels, which run one after the other. Node i has the site of line 1000 + i."""
        correlation = self.call("cudaGraphLaunch", self.launch_ns, line=line)
        for number, name in enumerate(names, 1):
            start, end = self._run(stream, 0, duration_ns, 0)
            self.emit(KernelRun(stream, name, correlation, start, end, graph_node=number))
            self.emit(GraphNodeSite(number), line=1000 + number)

    def copy(
        self, size_bytes: int, duration_ns: int, *, stream: int = 1, line: int = 0,
        direction: Direction = Direction.HOST_TO_DEVICE, host: MemoryKind = MemoryKind.PINNED,
    ) -> None:  # fmt: skip
        """Start a copy; that of pageable memory blocks the host."""
        to_device = direction is Direction.HOST_TO_DEVICE
        start, end = self._run(stream, 0, duration_ns, self.now_ns + self.launch_ns)
        is_blocking = host is MemoryKind.PAGEABLE
        call_ns = end - self.now_ns if is_blocking else self.launch_ns
        correlation = self.call("cudaMemcpyAsync", call_ns, line=line)
        memory = (host, MemoryKind.DEVICE) if to_device else (MemoryKind.DEVICE, host)
        self.emit(CopyRun(stream, start, end, size_bytes, correlation, -1, direction, *memory))

    def fill(self, size_bytes: int, duration_ns: int, *, stream: int = 1, line: int = 0) -> None:
        """Start a memset."""
        correlation = self.call("cudaMemsetAsync", self.launch_ns, line=line)
        start, end = self._run(stream, 0, duration_ns, 0)
        self.emit(FillRun(stream, start, end, size_bytes, correlation))

    def synchronize(self, *, line: int = 0, latency_ns: int = 2 * US) -> None:
        """Wait for all work; the call returns ``latency_ns`` after the work has ended."""
        start = self.now_ns
        end = max([start, *self.stream_end_ns.values()]) + latency_ns
        self.call("cudaStreamSynchronize", end - start, line=line)

    def synchronize_in(self, function: str, *, line: int = 0) -> None:
        """Call a function that waits for all work, without a record of the synchronization."""
        end = max([self.now_ns, *self.stream_end_ns.values()])
        self.call(function, end - self.now_ns + 2 * US, line=line)

    # --- the trace

    def batch(self, *, simulated: bool = False) -> Batch:
        """Return all events as one batch."""
        strings: dict[str, int] = {"": 0}
        records = pack(self.events, lambda text: strings.setdefault(text, len(strings)))
        return Batch(self.process, records, list(strings), list(self._stacks), simulated=simulated)

    def activities(self) -> Activities:
        """Return the activities of the program."""
        return activities_of(self)[0]

    def write_log(self, path: Path, *, simulated: bool = False) -> None:
        """Write the trace as a log of ``run --profile --log``."""
        with path.open("wb") as file:
            log = LogWriter(file)
            log.add(self.batch(simulated=simulated))
            log.finish(Outcome(exit_status=0))

    def _run(self, stream: int, device: int, duration_ns: int, after_ns: int) -> tuple[int, int]:
        start = max(self.now_ns, self.stream_end_ns[device, stream], after_ns)
        self.stream_end_ns[device, stream] = start + duration_ns
        return start, start + duration_ns

    def emit(self, body: EventBody, *, line: int = 0, device: int = 0) -> None:
        site = 0
        if line:
            stack = (
                Frame("forward", "/venv/site-packages/torch/nn/linear.py", 12),
                Frame("step", "/home/me/train.py", line),
                Frame("<module>", "/home/me/train.py", 1),
            )
            site = self._stacks.setdefault(stack, len(self._stacks))
        self.events.append(
            Event(
                body,
                seq=len(self.events) + 1,
                time_ns=self.now_ns,
                thread=self.thread,
                context=1,
                site=site,
                device=device,
            )
        )


def activities_of(*programs: Program) -> list[Activities]:
    """Return the activities of several processes."""
    collector = ActivityCollector()
    for program in programs:
        collector.add(program.batch())
    return collector.activities()
