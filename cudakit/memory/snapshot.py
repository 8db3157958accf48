"""A memory snapshot as columns: the final state of an allocator, and the trace of events before it.

Addresses and sizes are in bytes, times in Unix microseconds. A call stack, a text or a pool is an index into
the tables of the Snapshot; index 0 is the empty stack, the empty text and the default pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from cudakit.stacks import Frame, site_rank

Addresses: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.int64]
Ids: TypeAlias = npt.NDArray[np.int32]
Codes: TypeAlias = npt.NDArray[np.uint8]
Mask: TypeAlias = npt.NDArray[np.bool_]

# The device number of pinned host memory.
HOST = -1
# The key of NVTX marks in files of ``run --memory``.
MARKS_KEY = "cudakit_marks"
# The index of an event before the first recorded event.
BEFORE_TRACE = -1


class Action(IntEnum):
    """The action of a trace entry (torch/csrc/cuda/memory_snapshot.cpp, ``action_to_str``)."""

    UNKNOWN = 0
    ALLOC = 1
    FREE_REQUESTED = 2
    FREE_COMPLETED = 3
    FREE = 4  # A free that one event both requests and completes. Other tools write it, PyTorch does not.
    SEGMENT_ALLOC = 5
    SEGMENT_FREE = 6
    SEGMENT_MAP = 7
    SEGMENT_UNMAP = 8
    SNAPSHOT = 9
    OOM = 10
    ANNOTATE = 11


class BlockState(IntEnum):
    """The state of a block when the snapshot is taken."""

    INACTIVE = 0
    ALLOCATED = 1
    PENDING_FREE = 2  # freed by the program; a stream may still use it


class SegmentKind(IntEnum):
    """The size class of a segment: for requests up to 1 MiB, or for larger ones."""

    SMALL = 0
    LARGE = 1
    UNKNOWN = 2


@dataclass(frozen=True, slots=True)
class Events:
    """The trace of one device, oldest event first; every array has one item per event."""

    action: Codes
    address: Addresses  # address of the memory; for an OOM event the free bytes of the device
    size: Ints  # size of the memory; for alloc and free the bytes that the program requested
    stream: Ids  # index into DeviceTrace.streams
    time_us: Ints  # time of each event; all 0 if the file has no times
    stack: Ids
    pool: Ids  # index of the pool; -1: not recorded
    compile_context: Ids
    user_metadata: Ids
    category: Ids

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of the final state, by address; every array has one item per segment."""

    address: Addresses
    size: Ints
    stream: Ids
    kind: Codes  # SegmentKind of each segment
    pool: Ids
    expandable: Mask
    stack: Ids

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of the final state, by address; every array has one item per block."""

    segment: Ids  # index into Segments
    address: Addresses
    size: Ints
    requested: Ints  # requested bytes; 0 if inactive
    state: Codes  # BlockState of each block
    stack: Ids

    def __len__(self) -> int:
        return len(self.address)


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


_Arrays = TypeVar("_Arrays", bound=_Dataclass)


def take(arrays: _Arrays, selection: npt.NDArray[Any] | slice) -> _Arrays:
    """Select items of every array of a dataclass, by indices, a mask or a range."""
    return type(arrays)(*(getattr(arrays, field.name)[selection] for field in fields(arrays)))


def concatenate(first: _Arrays, second: _Arrays) -> _Arrays:
    """Concatenate every array of two dataclasses of one type."""
    names = [field.name for field in fields(first)]
    return type(first)(
        *(np.concatenate((getattr(first, name), getattr(second, name))) for name in names)
    )


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """The part of a snapshot for one device (or, as device HOST, for pinned host memory)."""

    device: int
    events: Events
    segments: Segments
    blocks: Blocks
    # Raw stream handles, in order of appearance; the first is 0, the default stream.
    streams: tuple[int, ...]
    overflowed: bool | None = None  # whether old events were dropped; None: not recorded
    warnings: tuple[str, ...] = ()  # defects found while reading


@dataclass(frozen=True, slots=True)
class Annotation:
    """The start or end of a named range, such as one of ``record_function``."""

    name: str
    is_start: bool
    device: int
    time_us: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A named point in time: an NVTX mark that ``run --memory`` recorded."""

    name: str
    device: int
    time_us: int


@dataclass(frozen=True, slots=True)
class AllocatorCalls:
    """The variables and calls that control the allocator that wrote a snapshot."""

    settings_variable: str
    empty_cache: str
    set_limit: str
    wait_for_stream: str
    synchronize: str
    record_trace: str
    record_stacks: str  # the argument of ``record_trace`` that records more call stacks
    mark_step: str


PYTORCH_CALLS = AllocatorCalls(
    settings_variable="PYTORCH_CUDA_ALLOC_CONF",
    empty_cache="torch.cuda.empty_cache()",
    set_limit="torch.cuda.set_per_process_memory_fraction",
    wait_for_stream="torch.cuda.current_stream().wait_stream(side), instead of record_stream",
    synchronize="torch.cuda.synchronize()",
    record_trace="torch.cuda.memory._record_memory_history()",
    record_stacks='stacks="all"',
    mark_step="torch.profiler.record_function(f'step {i}')",
)
CUDAKIT_CALLS = AllocatorCalls(
    settings_variable="CUDAKIT_ALLOC_CONF",
    empty_cache="CachingAllocator.empty_cache()",
    set_limit="CachingAllocator.set_memory_fraction",
    wait_for_stream="an event of the side stream, instead of record_use",
    synchronize="process_events() after a device synchronization",
    record_trace="CachingAllocator.record_history()",
    record_stacks='context="all"',
    mark_step="CachingAllocator.annotated(f'step {i}')",
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One file: devices, and the tables that their columns point into."""

    source: str
    format: str  # format of the file: "pickle" or "json"
    size_bytes: int  # size of the uncompressed file
    devices: tuple[DeviceTrace, ...]
    frames: tuple[Frame, ...]
    stacks: tuple[tuple[int, ...], ...]  # frame indices, innermost first; stacks[0] is empty
    texts: tuple[str, ...]  # texts by index; texts[0] is ""
    pools: tuple[tuple[int, int], ...]  # pools[0] is (0, 0), the default pool
    annotations: tuple[Annotation, ...] = ()
    marks: tuple[Mark, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_times: bool = True

    @property
    def calls(self) -> AllocatorCalls:
        """The names of the calls of the allocator that wrote this file: PyTorch's or cudakit's."""
        is_of_cudakit = any(name.startswith("cudakit_") for name in self.settings)
        return CUDAKIT_CALLS if is_of_cudakit else PYTORCH_CALLS


# --- The pools of GPU memory that cudakit records besides PyTorch's, and their ids in snapshots ----

PoolId: TypeAlias = tuple[int, int]

# Names of the pools of memory that the driver returned, but that no recorded library divides into blocks.
DRIVER = "driver"
MANAGED = "managed memory"
JAX = "jax"

_POOL_NAMES = (DRIVER, MANAGED, "cupy", "numba", "rmm", JAX)
# The first pool id of cudakit. PyTorch counts its pools from 1: (n, 0) is the pool of a CUDA graph,
# and (0, n) is a MemPool.
_FIRST_POOL_ID = 1 << 20

POOL_IDS: dict[str, PoolId] = {
    name: (0, _FIRST_POOL_ID + index) for index, name in enumerate(_POOL_NAMES)
}
POOL_NAMES: dict[PoolId, str] = {pool_id: name for name, pool_id in POOL_IDS.items()}


def pool_name(pool: PoolId) -> str:
    """Return the name of a pool: the default pool, that of a graph (n, 0), a MemPool (0, n), or a library."""
    if pool == (0, 0):
        return "default"
    if pool in POOL_NAMES:
        return POOL_NAMES[pool]
    return f"graph {pool[0]},{pool[1]}" if pool[0] else f"MemPool {pool[0]},{pool[1]}"


def time_of(snapshot: Snapshot, trace: DeviceTrace, event_index: int) -> int | None:
    """Return the time of an event in Unix microseconds; None if the file records no times."""
    if event_index == BEFORE_TRACE or not snapshot.has_times or event_index >= len(trace.events):
        return None
    return int(trace.events.time_us[event_index])


# --- Call stacks with their frames, and the call site: the innermost frame in the code of the program ---


def site_name(frame: Frame) -> str:
    """Return a frame as ``folder/file.py:12 function``."""
    short_path = "/".join(frame.filename.replace("\\", "/").split("/")[-2:])
    path_and_line = f"{short_path}:{frame.line}" if frame.line else short_path
    return f"{path_and_line} {frame.name}".strip()


class CallSite(TypedDict):
    """Fields of results that name a call stack."""

    stack: tuple[Frame, ...]  # innermost frame first
    site: int  # index of the call site in ``stack``


class StackTable:
    """The call stacks of a snapshot with their frames and call sites, shared by all of its devices."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._ranks = [site_rank(frame) for frame in snapshot.frames]
        self._call_sites: dict[int, CallSite] = {}

    def call_site(self, stack: int) -> CallSite:
        """Return the frames of a stack, and the index of its call site: the innermost of the lowest rank."""
        if stack not in self._call_sites:
            frames = self.snapshot.frames
            self._call_sites[stack] = {
                "stack": tuple(frames[index] for index in self.snapshot.stacks[stack]),
                "site": self._site_index(stack),
            }
        return self._call_sites[stack]

    def _site_index(self, stack: int) -> int:
        ranks = [self._ranks[frame] for frame in self.snapshot.stacks[stack]]
        return ranks.index(min(ranks)) if ranks else 0

    def frames(self, stack: int) -> tuple[Frame, ...]:
        """Return the frames of a stack, innermost first."""
        return self.call_site(stack)["stack"]

    @cached_property
    def site_frames(self) -> Ids:
        """The frame id of the call site of each stack; -1 for the empty stack."""
        stacks = self.snapshot.stacks
        sites = (ids[self._site_index(stack)] if ids else -1 for stack, ids in enumerate(stacks))
        return np.fromiter(sites, np.int32, len(stacks))
