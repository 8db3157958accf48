"""The result of ``run --profile``, which is also its JSON document (``cudakit.profile/1``).

Times are in nanoseconds; instants count from the first activity of the profile. The tables of a device
cover its ``measured`` time: the steps after the warm-up, or without steps all time from the first to the
last work. A call stack has the innermost Python frame first; ``site`` is the index of its call site, the
innermost frame outside of libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from cudakit.stacks import Frame
from cudakit.trace.kinds import Direction

StepSource: TypeAlias = Literal["range", "mark", "repetition", "none"]

DIRECTION_NAMES = {
    Direction.HOST_TO_DEVICE: "host to device",
    Direction.DEVICE_TO_HOST: "device to host",
    Direction.DEVICE_TO_DEVICE: "within the device",
    Direction.HOST_TO_HOST: "host to host",
}


@dataclass(frozen=True, slots=True)
class IdleTime:
    """The idle time of a device by cause; the causes add up to the idle time exactly."""

    launch_ns: int  # the host enqueued work more slowly than the GPU completed it
    host_wait_ns: int  # the host waited for the GPU, and the GPU then waited for new work
    allocation_ns: int  # the host allocated or freed memory by the driver
    data_loading_ns: int  # the host was outside of CUDA for long before it copied data to the GPU
    other_host_ns: int  # the host was outside of CUDA for long, for another reason
    dependency_ns: int  # enqueued work waited for other streams or for its predecessor
    unknown_ns: int  # the call that launched the next work was not recorded
    not_started_ns: int  # no work had been enqueued yet
    ended_ns: int  # no more work was enqueued


@dataclass(frozen=True, slots=True)
class TimeDivision:
    """An interval of time, divided into busy and idle time of a device."""

    start_ns: int  # start of the interval; 0 is the start of the first activity of the recording
    end_ns: int  # end of the interval, counted from the same moment
    length_ns: int  # length of the interval, without the steps in it that are not measured
    busy_ns: int  # time in which at least one kernel, copy or memset ran
    idle: IdleTime  # idle time by cause

    @property
    def busy_share(self) -> float:
        """The busy time divided by the length; 0 for an empty interval."""
        return self.busy_ns / self.length_ns if self.length_ns else 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the program, as a device performed it."""

    number: int  # number of the step, from 1
    is_warm_up: bool  # whether the step is left out, because it is part of the warm-up
    is_slow: bool  # whether the step is left out, because it is much slower than the median
    time: TimeDivision  # busy and idle time of the step


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a device."""

    # property of steps: an NVTX range, a mark, or repeated launches; none: no steps
    source: StepSource
    name: str  # name of the range or mark; empty for repeated launches
    warm_up: int  # number of leading steps that are slower, and left out of the measured time
    slow: int  # number of later steps that take over 3 times the median, and are left out
    measured: int  # number of measured steps; 0 without steps
    median_ns: int  # median time of the measured steps; 0 without steps
    steps: tuple[Step, ...]  # the first 10,000 steps


@dataclass(frozen=True, slots=True)
class Grid:
    """How the grid of a kernel fills the device, if all of its blocks take the same time."""

    blocks: int  # number of thread blocks of the grid
    threads_per_block: int  # number of threads of a block
    registers_per_thread: int  # number of registers of a thread
    shared_bytes_per_block: int  # shared memory of a block
    multiprocessors_share: float  # share of the multiprocessors that get at least one block
    threads_share: float  # largest share of the device's resident threads that the kernel uses
    waves: float  # number of blocks divided by the number of blocks that run at the same time
    tail_share: float  # block slots that stay empty in the last wave, divided by those of all waves


@dataclass(frozen=True, slots=True)
class Kernel:
    """All runs of one kernel."""

    name: str  # demangled name of the kernel
    calls: int  # number of runs
    total_ns: int  # summed time of all runs
    mean_ns: int  # mean time of a run
    median_ns: int  # median time of a run
    share: float  # share of the summed time of all GPU work
    # call stack that launched the most time of the kernel; empty if not recorded
    stack: tuple[Frame, ...]
    site: int  # index of the call site in `stack`
    sites: int  # number of different call sites
    blocks: int  # median number of thread blocks
    consecutive: float  # mean number of runs without other work between them in their stream
    # grid of the longest run; null if limits of the device are not recorded
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of Python code that launched GPU work, itself or in functions that it called."""

    frame: Frame  # function, file and line
    own_ns: int  # time of work whose call site is this line
    cumulative_ns: int  # time of work with this line anywhere in its call stack
    calls: int  # number of kernels, copies and memsets in the cumulative time
    share: float  # share of the cumulative time in the summed time of all GPU work


@dataclass(frozen=True, slots=True)
class NamedRange:
    """All GPU work that was launched within NVTX ranges of one name."""

    name: str  # name of the range, with # for a number
    domain: str  # NVTX domain; empty for the default domain
    count: int  # number of kernels, copies and memsets
    total_ns: int  # time of the work
    share: float  # share of the summed time of all GPU work


@dataclass(frozen=True, slots=True)
class Copies:
    """All copies with one direction and one kind of host memory."""

    direction: Direction  # direction of the copies
    # kind of host memory; "none" for copies between devices
    host: Literal["pageable", "pinned", "managed", "unknown", "none"]
    peer: bool  # whether the copies are between two devices
    calls: int  # number of copies
    size_bytes: int  # bytes of all copies
    total_ns: int  # summed time of all copies
    bytes_per_s: float | None  # bytes divided by time; null if the copies took no time
    overlapped_ns: int  # time in which a kernel ran, too
    stack: tuple[Frame, ...]  # call stack that started the copies with the most time
    site: int  # index of the call site in `stack`

    @property
    def name(self) -> str:
        """Direction and host memory: ``host to device, pageable``."""
        if self.peer:
            return "device to device"
        direction = DIRECTION_NAMES[self.direction]
        return direction if self.host == "none" else f"{direction}, {self.host}"


@dataclass(frozen=True, slots=True)
class Memsets:
    """The sums over all memsets of a device."""

    calls: int  # number of memsets
    size_bytes: int  # bytes of all memsets
    total_ns: int  # summed time of all memsets


@dataclass(frozen=True, slots=True)
class Collective:
    """All runs of one NCCL kernel with operations of one size."""

    name: str  # name of the NCCL kernel
    calls: int  # number of runs
    total_ns: int  # summed time of all runs
    overlapped_ns: int  # time in which another kernel ran, too
    stack: tuple[Frame, ...]  # call stack that launched the most time of the kernel
    site: int  # index of the call site in `stack`
    ranks: int | None = None  # number of ranks of the communicator; null if NCCL did not report it
    size_bytes: int | None = None  # size of the operations of one run; null if it is unknown
    algorithm_bytes_per_s: float | None = None  # size divided by time, as in nccl-tests
    bus_bytes_per_s: float | None = None  # bus bandwidth, as in nccl-tests


@dataclass(frozen=True, slots=True)
class StreamWork:
    """The work of one stream."""

    stream: int  # number of the stream
    calls: int  # number of kernels, copies and memsets
    busy_ns: int  # time in which work of the stream ran
    alone_ns: int  # time in which work of this stream ran, and no other work
    small_ns: int  # time of kernels with fewer thread blocks than half of the multiprocessors


@dataclass(frozen=True, slots=True)
class HostWait:
    """All calls of one function at one call site that made the host wait or change memory."""

    # whether the calls wait for work, or allocate and free memory
    kind: Literal["wait", "allocation"]
    function: str  # function of the CUDA driver
    calls: int  # number of calls
    blocked_ns: int  # time of the host in these calls
    idle_ns: int  # idle time of the device that the calls caused
    stack: tuple[Frame, ...]  # call stack of the calls
    site: int  # index of the call site in `stack`


@dataclass(frozen=True, slots=True)
class Device:
    """The work of one process on one device."""

    process: int  # PID of the process
    rank: int | None  # rank of the process in its job, as of torchrun; null if there is none
    device: int  # CUDA index in the process
    name: str  # name of the device; empty if it was not recorded
    multiprocessors: int  # number of multiprocessors; 0 if it was not recorded
    recorded: TimeDivision  # all recorded time
    measured: TimeDivision  # the time of the tables: the steps after the warm-up, or all work
    steps: Steps  # steps of the program on the device
    work_ns: int  # summed time of all kernels, copies and memsets
    launches: int  # number of kernels, copies and memsets
    kernels: tuple[Kernel, ...]  # kernels, the one with the most time first
    lines: tuple[Line, ...]  # lines of Python code that launched work
    ranges: tuple[NamedRange, ...]  # NVTX ranges in which work was launched
    copies: tuple[Copies, ...]  # copies by direction and kind of host memory
    copies_ns: int  # time in which at least one copy ran
    copies_overlapped_ns: int  # part of the time of copies in which a kernel ran, too
    collectives: tuple[Collective, ...]  # NCCL kernels by the size of their operations
    collectives_ns: int  # time in which at least one collective ran
    collectives_overlapped_ns: int  # part of the time of collectives in which another kernel ran
    streams: tuple[StreamWork, ...]  # work of each stream
    waits: tuple[HostWait, ...]  # calls in which the host waited, allocated or freed
    memsets: Memsets | None = None  # sums over all memsets; null if the device ran no memset
    graph_kernels: int = 0  # number of kernels that CUDA graphs launched


@dataclass(frozen=True, slots=True)
class Finding:
    """A way to make the program faster, with its evidence."""

    rule: str  # id of the rule, such as "launch-bound"
    process: int  # PID of the process
    device: int  # CUDA index in the process
    sentence: str  # description of the problem
    actions: tuple[str, ...]  # changes to the program, the most promising first
    saving_ns: int  # estimate of the time that the change saves in the measured time
    saving_share: float | None  # share of the measured time; null if losses forbid an estimate
    estimate: str  # method by which the saving was estimated
    # call stack of the code to change; empty if several stacks are involved
    stack: tuple[Frame, ...]
    site: int  # index of the call site in `stack`


@dataclass(frozen=True, slots=True)
class Straggler:
    """Collectives of all ranks in the measured time, matched by their order."""

    matched: int  # number of collectives that were matched
    process: int  # PID of the process that most often came last
    device: int  # CUDA index in this process
    last_count: int  # number of collectives that this process began last
    waited_ns: int  # summed time that the other ranks waited for this process


@dataclass(frozen=True, slots=True)
class Limit:
    """A rate of this profile beside the rate that ``cudakit bench`` measured on the device."""

    name: str  # name of the compared rate, such as "copies: host to device, pinned"
    process: int  # PID of the process
    device: int  # CUDA index in the process
    bytes_per_s: float  # rate of this profile
    limit_bytes_per_s: float  # rate that `cudakit bench` measured
    share: float  # the rate divided by the limit
    simulated: bool = False  # whether the limit is that of a simulated device


@dataclass(frozen=True, slots=True)
class LaunchLimit:
    """The kernel launches of this profile beside those that ``cudakit bench launch`` measured."""

    process: int  # PID of the process
    device: int  # CUDA index in the process
    interval_ns: float  # measured time divided by the number of kernels launched outside of graphs
    limit_interval_ns: float  # measured time between back-to-back launches of an empty kernel
    share: float  # the limit divided by the interval
    short_kernels: int  # number of kernel runs whose kernel takes no longer than the limit (median)
    short_kernels_share: float  # share of short kernels in the summed time of all GPU work
    simulated: bool = False  # whether the limit is that of a simulated device


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """The GPU time of a program: busy and idle time, kernels, lines and findings."""

    schema: ClassVar[str] = "cudakit.profile/1"
    exit_status: int | None  # exit status of the program, as in a shell; null if unknown
    simulated: bool  # whether a simulated device did the work
    devices: tuple[Device, ...]  # work of each process on each of its devices
    findings: tuple[Finding, ...]  # the largest saving first
    straggler: (
        Straggler | None
    )  # slowest rank; null for one rank, or if collectives of ranks differ
    limits: tuple[Limit, ...]  # rates of copies and memsets beside those of --bench
    gaps: Mapping[str, int]  # reasons why events could not be recorded, with the number of events
    notes: tuple[str, ...]  # sentences on the limits of the result
    incomplete: tuple[str, ...]  # reasons why recorded events are missing
    launch_limits: tuple[LaunchLimit, ...] = ()  # kernel launches beside those of --bench
