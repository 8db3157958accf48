"""Build a snapshot in PyTorch's format from the memory of a process, merged with PyTorch's own snapshot.

Format: torch/csrc/cuda/memory_snapshot.cpp of torch 2.15. Viewers ignore keys that they do not know.
"""

from __future__ import annotations

import gc
import gzip
import io
import os
import pickle
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from cudakit.errors import SnapshotError
from cudakit.memory.process import (
    MAX_EVENTS,
    MemoryModel,
    ProcessMemory,
    Segment,
)
from cudakit.memory.snapshot import HOST, MARKS_KEY, POOL_IDS, POOL_NAMES
from cudakit.stacks import BACKWARD_FRAME, Frame, Stack

# A snapshot as ``torch.cuda.memory._snapshot`` returns it.
Snapshot: TypeAlias = dict[str, Any]
_FrameDict: TypeAlias = dict[str, Any]
_EntryDict: TypeAlias = dict[str, Any]  # an event of a trace

# The sign of the change of reserved memory by the action of an event.
_SIGN_BY_ACTION = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
# The innermost frame of the call stacks of autograd's threads.
_BACKWARD_FRAME = {"name": BACKWARD_FRAME, "filename": "", "line": 0}


def build_snapshot(
    memory: ProcessMemory, *, unix_offset_ns: int, torch_snapshot: Snapshot | None
) -> Snapshot:
    """Return the snapshot of a process, with all recorded memory.

    ``torch_snapshot`` is PyTorch's snapshot of this process, which the function changes, or None. The sum of
    ``unix_offset_ns`` and a time of the trace is Unix time.
    """
    writer = _Writer(memory, unix_offset_ns)
    snapshot = torch_snapshot
    if snapshot is None:
        snapshot = {
            "segments": [],
            "device_traces": [],
            "allocator_settings": {},
            "external_annotations": [],
        }
    _attribute_backward_passes(snapshot, writer)
    torch_ranges = _TorchRanges(snapshot)
    writer.add_devices(snapshot, torch_ranges)
    writer.add_pinned(snapshot, torch_ranges)
    writer.add_ranges_and_marks(snapshot)
    return snapshot


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot that PyTorch wrote.

    A file with the suffix ``.gz`` is decompressed. Raises SnapshotError for a file that cannot be read, or
    contains anything but builtin types.
    """
    # The garbage collector would run often while millions of containers are created, and double the time.
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        snapshot = _Unpickler(io.BytesIO(content)).load()
    except (OSError, zlib.error, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise SnapshotError(f"cannot read {path}: {error}") from error
    finally:
        if gc_was_enabled:
            gc.enable()
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("segments"), list):
        raise SnapshotError(f"{path} is not a snapshot of PyTorch")
    return snapshot


def write_snapshot(snapshot: Snapshot, path: Path) -> None:
    """Write a snapshot, compressed if the suffix is ``.gz``; replace an existing file atomically.

    Raises OSError.
    """
    # The name is random and the mode is "x", because another user could place a symbolic link at a
    # predictable name.
    temporary_path = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")
    try:
        # Level 6 is the default of the gzip program. A higher one takes several times longer.
        with (
            gzip.open(temporary_path, "xb", 6)
            if path.suffix == ".gz"
            else temporary_path.open("xb") as file
        ):
            pickle.dump(snapshot, file, protocol=4)
        temporary_path.replace(path)
    finally:
        temporary_path.unlink(missing_ok=True)


def extended_stem(path: Path, text: str) -> Path:
    """Insert a text before the suffix of a path; before ``.pkl.gz``, not only before ``.gz``."""
    suffix = "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:])
    return path.with_name(f"{path.name.removesuffix(suffix)}{text}{suffix}")


class _Unpickler(pickle.Unpickler):
    """An unpickler that creates only builtin containers and refuses all other classes."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"the file refers to {module_name}.{global_name}")


class _Writer:
    """Converts the memory of a process to the dictionaries of a snapshot."""

    def __init__(self, memory: ProcessMemory, unix_offset_ns: int) -> None:
        self.memory = memory
        self._unix_offset_ns = unix_offset_ns
        self._frames: dict[int, list[_FrameDict]] = {}  # frames by the id() of a call stack

    def add_devices(self, snapshot: Snapshot, torch_ranges: _TorchRanges) -> None:
        """Add the segments and events that do not belong to PyTorch's allocator."""
        model = self.memory.model
        segments = [
            segment
            for segment in model.segments
            if segment.device != HOST and not self._is_of_torch(segment, torch_ranges)
        ]
        snapshot["segments"] = sorted(
            [*snapshot["segments"], *map(self._segment_entry, segments)], key=itemgetter("address")
        )
        traces = snapshot.setdefault("device_traces", [])
        devices = [device for device in model.entries if device != HOST]
        highest_device = max([*devices, *(segment.device for segment in segments)], default=-1)
        traces += ([] for _ in range(highest_device + 1 - len(traces)))
        overflow_flags = [len(trace) >= MAX_EVENTS for trace in traces]
        for device in devices:
            entries = self._trace_entries(model, device, torch_ranges)
            has_overflowed = device in model.overflowed_devices and bool(entries)
            traces[device], overflow_flags[device] = _merge_traces(
                (traces[device], overflow_flags[device]), (entries, has_overflowed)
            )
        snapshot["trace_alloc_overflowed"] = overflow_flags

    def add_pinned(self, snapshot: Snapshot, torch_ranges: _TorchRanges) -> None:
        """Add pinned host memory, unless PyTorch's own snapshot contains it."""
        model = self.memory.model
        is_recorded = snapshot.get("host_traces") or snapshot.get("host_segments")
        if is_recorded or HOST not in model.entries:
            return
        snapshot["host_segments"] = [
            {
                "address": segment.address,
                "size": segment.size_bytes,
                "requested_size": segment.requested_bytes,
                "allocated": 1,
                "active": 1,
                "segment_pool_id": POOL_IDS.get(segment.pool, (0, 0)),
                "frames": self.frames(segment.stack),
            }
            for segment in model.segments
            if segment.device == HOST
        ]
        snapshot["host_traces"] = self._trace_entries(model, HOST, torch_ranges)

    def add_ranges_and_marks(self, snapshot: Snapshot) -> None:
        """Add named ranges as annotations, and marks, to every device that has a trace."""
        devices = [device for device, trace in enumerate(snapshot["device_traces"]) if trace]
        annotations = [
            {"name": each.name, "stage": stage, "device": device, "time_us": self.unix_us(time_ns)}
            for each in self.memory.ranges
            for stage, time_ns in (("START", each.begin_ns), ("END", each.end_ns))
            if time_ns is not None
            for device in devices
        ]
        all_annotations = snapshot.setdefault("external_annotations", [])
        all_annotations += annotations
        if annotations and all(isinstance(each.get("time_us"), int) for each in all_annotations):
            all_annotations.sort(key=itemgetter("time_us"))
        marks = [
            {"name": mark.name, "device": device, "time_us": self.unix_us(mark.time_ns)}
            for mark in self.memory.marks
            for device in devices
        ]
        if marks:
            snapshot[MARKS_KEY] = marks

    def frames(self, stack: Stack) -> list[_FrameDict]:
        """Return a call stack, innermost frame first. Equal stacks share their frames."""
        if id(stack) not in self._frames:
            self._frames[id(stack)] = [
                {"name": frame.name, "filename": frame.filename, "line": frame.line}
                for frame in stack
            ]
        return list(self._frames[id(stack)])

    def unix_us(self, time_ns: int) -> int:
        """Return the Unix time in microseconds of a time in the trace."""
        return (time_ns + self._unix_offset_ns) // 1000

    def _is_of_torch(self, segment: Segment, torch_ranges: _TorchRanges) -> bool:
        end_us = _NEVER if segment.end_ns is None else self.unix_us(segment.end_ns)
        return torch_ranges.includes(segment, self.unix_us(segment.begin_ns), end_us)

    def _trace_entries(
        self, model: MemoryModel, device: int, torch_ranges: _TorchRanges
    ) -> list[_EntryDict]:
        """Return the events of a device without those of PyTorch's segments."""
        is_of_torch: dict[int, bool] = {}  # key: the id() of a segment
        entries = []
        for entry in model.entries[device]:
            segment = entry.segment
            if id(segment) not in is_of_torch:
                is_of_torch[id(segment)] = self._is_of_torch(segment, torch_ranges)
            is_dropped = entry.is_segment_as_block and not segment.is_undivided
            if is_of_torch[id(segment)] or is_dropped:
                continue
            entries.append(
                {
                    "action": entry.action,
                    "device_free" if entry.action == "oom" else "addr": entry.address,
                    "size": entry.size_bytes,
                    "stream": segment.stream,
                    "time_us": self.unix_us(entry.time_ns),
                    "compile_context": "N/A",
                    "user_metadata": segment.pool,
                    "pool_id": POOL_IDS.get(segment.pool, (0, 0)),
                    "frames": self.frames(entry.stack),
                }
            )
        entries.sort(key=itemgetter("time_us"))
        return entries

    def _segment_entry(self, segment: Segment) -> dict[str, Any]:
        blocks = list(self._block_entries(segment))
        blocks_in_use = [block for block in blocks if block["state"] == "active_allocated"]
        used_bytes = sum(block["size"] for block in blocks_in_use)
        return {
            "device": segment.device,
            "address": segment.address,
            "total_size": segment.size_bytes,
            "allocated_size": used_bytes,
            "active_size": used_bytes,
            "requested_size": sum(block["requested_size"] for block in blocks_in_use),
            "stream": segment.stream,
            "segment_type": "large",
            "segment_pool_id": POOL_IDS.get(segment.pool, (0, 0)),
            "is_expandable": False,
            "frames": self.frames(segment.stack),
            "blocks": blocks,
        }

    def _block_entries(self, segment: Segment) -> Iterator[dict[str, Any]]:
        """Yield the blocks of a segment by address, with the free ranges between them."""
        if segment.is_undivided:
            yield self._block_entry(
                segment.address, segment.size_bytes, segment.requested_bytes, segment.stack
            )
            return
        blocks = sorted(segment.blocks.items())
        next_addresses = [*(address for address, _ in blocks[1:]), segment.end]
        end = segment.address
        for (address, block), next_address in zip(blocks, next_addresses, strict=False):
            if address > end:
                yield self._block_entry(end, address - end)
            # A pool may round less than the model: JAX and RMM round to 256 bytes.
            size_bytes = min(block.size_bytes, next_address - address)
            yield self._block_entry(address, size_bytes, block.requested_bytes, block.stack)
            end = address + size_bytes
        if segment.end > end:
            yield self._block_entry(end, segment.end - end)

    def _block_entry(
        self, address: int, size_bytes: int, requested_bytes: int = 0, stack: Stack = ()
    ) -> dict[str, Any]:
        """Return a block in the format of a snapshot; the block is free if ``requested_bytes`` is 0."""
        return {
            "address": address,
            "size": size_bytes,
            "requested_size": requested_bytes,
            "state": "active_allocated" if requested_bytes else "inactive",
            "frames": self.frames(stack),
        }


def _merge_traces(
    *traces_with_overflow: tuple[list[_EntryDict], bool],
) -> tuple[list[_EntryDict], bool]:
    """Merge the traces of PyTorch and of cudakit by time, and return whether old events are missing.

    Each trace comes with a flag: whether it lost its old events. The older events of the other trace are
    then dropped too, because a trace must be complete from its first event.
    """
    (torch_entries, _), (entries, _) = traces_with_overflow
    has_overflowed = any(flag for _, flag in traces_with_overflow)
    if not torch_entries or not all("time_us" in entry for entry in torch_entries):
        return [*torch_entries, *entries], has_overflowed
    begin_us = max((trace[0]["time_us"] for trace, flag in traces_with_overflow if flag), default=0)
    complete_traces = (
        [entry for entry in trace if entry["time_us"] >= begin_us]
        for trace, _ in traces_with_overflow
    )
    return list(merge(*complete_traces, key=itemgetter("time_us"))), has_overflowed


# --- memory of PyTorch

# A Unix time in microseconds, later than any event, yet finite, so that differences are defined.
_NEVER = 1e18


class _TorchRange(NamedTuple):
    """An address range of PyTorch's allocator, and the time in which it was reserved."""

    begin: int  # first address of the range
    end: int  # first address after the range
    # Unix times in microseconds of the driver allocation (-_NEVER if before the trace) and of the free
    # (_NEVER if not freed).
    begin_us: float
    end_us: float


class _TorchRanges:
    """All address ranges that PyTorch's allocator got from the driver, with their times."""

    def __init__(self, snapshot: Snapshot) -> None:
        ranges: list[_TorchRange] = []
        for trace in snapshot.get("device_traces", []):
            ranges += _ranges_of_trace(trace)
        reserved_at_end = {each.begin for each in ranges if each.end_us == _NEVER}
        for segment in snapshot["segments"]:
            address, size_bytes = segment["address"], segment["total_size"]
            if address not in reserved_at_end:
                ranges.append(_TorchRange(address, address + size_bytes, -_NEVER, _NEVER))
        self._ranges = sorted(ranges)
        self._begin_addresses = [each.begin for each in self._ranges]
        self._longest_bytes = max((each.end - each.begin for each in ranges), default=0)

    def includes(self, segment: Segment, begin_us: float, end_us: float) -> bool:
        """Return whether PyTorch's allocator made a driver allocation, given as a segment and its times.

        The two clocks differ by microseconds, and PyTorch records a segment some time after the driver. So
        the two intervals in time must overlap by half of the shorter one.
        """
        first = bisect_left(self._begin_addresses, segment.address - self._longest_bytes)
        end = bisect_right(self._begin_addresses, segment.end - 1)
        for each in self._ranges[first:end]:
            shared_us = min(each.end_us, end_us) - max(each.begin_us, begin_us)
            shorter_us = min(each.end_us - each.begin_us, end_us - begin_us)
            if each.end > segment.address and shared_us > 0 and shared_us >= shorter_us / 2:
                return True
        return False


def _ranges_of_trace(trace: Sequence[Mapping[str, Any]]) -> list[_TorchRange]:
    ranges: list[_TorchRange] = []
    open_ranges: dict[int, tuple[int, float]] = {}
    for entry in trace:
        address, time_us = entry.get("addr", 0), entry.get("time_us", 0)
        sign = _SIGN_BY_ACTION.get(entry["action"], 0)
        if sign > 0:
            open_ranges[address] = (entry["size"], time_us)
        elif sign < 0:
            size_bytes, begin_us = open_ranges.pop(address, (entry["size"], -_NEVER))
            ranges.append(_TorchRange(address, address + size_bytes, begin_us, time_us))
    for address, (size_bytes, begin_us) in open_ranges.items():
        ranges.append(_TorchRange(address, address + size_bytes, begin_us, _NEVER))
    return ranges


def _attribute_backward_passes(snapshot: Snapshot, writer: _Writer) -> None:
    """Give memory without a call stack the stack of the backward pass that allocated this memory.

    Autograd's threads have no Python frames. Memory that was allocated while two
    backward passes ran gets no call stack.
    """
    times, stacks = _backward_stacks(writer)
    if not times:
        return
    for device, trace in enumerate(snapshot.get("device_traces", [])):
        frames_by_address: dict[int, list[_FrameDict]] = {}
        for entry in trace:
            if not entry.get("frames") and "time_us" in entry:
                index = bisect_right(times, entry["time_us"]) - 1
                entry["frames"] = list(stacks[index]) if index >= 0 else []
            if entry["action"] == "alloc":
                frames_by_address[entry["addr"]] = entry.get("frames") or []
        for segment in snapshot["segments"]:
            for block in segment["blocks"] if segment["device"] == device else ():
                if not block.get("frames") and block["state"] != "inactive":
                    block["frames"] = list(frames_by_address.get(block.get("address"), []))


def _backward_stacks(writer: _Writer) -> tuple[list[int], list[list[_FrameDict]]]:
    """Return the times at which backward passes begin or end, and the call stack from each time on.

    The call stack is that of the only backward pass at this time; empty without one.
    """
    passes = [each for each in writer.memory.ranges if each.is_backward_pass]
    changes = [(writer.unix_us(each.begin_ns), 1, index) for index, each in enumerate(passes)]
    changes += [
        (writer.unix_us(each.end_ns), -1, index)
        for index, each in enumerate(passes)
        if each.end_ns is not None
    ]
    changes.sort()
    stacks: list[list[_FrameDict]] = []
    active: set[int] = set()
    for _, sign, index in changes:
        active.add(index) if sign > 0 else active.discard(index)
        stack = passes[next(iter(active))].stack if len(active) == 1 else ()
        stacks.append([_BACKWARD_FRAME, *writer.frames(stack)] if stack else [])
    return [time_us for time_us, _, _ in changes], stacks


# --- Find the allocation at which a program exceeded a limit of reserved device memory -------------


@dataclass(frozen=True, slots=True)
class LimitPassed:
    """The first moment at which a process has reserved more memory of a device than the limit."""

    device: int
    reserved_bytes: int  # reserved memory at the first moment above the limit
    peak_bytes: int  # maximum of the reserved memory until the end
    # Size of the allocation that exceeded the limit; 0 if the limit was exceeded before the trace began.
    size_bytes: int
    pool: str  # name of the pool of this allocation; "" if it was before the trace
    stack: Stack  # call stack of this allocation; () if it was before the trace


def find_limit_passed(snapshot: Snapshot, limit_bytes: int) -> list[LimitPassed]:
    """Return the first moment above the limit for each device that exceeded the limit.

    Reserved memory is the sum of the segments of all allocators in the process, without the CUDA context.
    """
    return [
        passed
        for device, trace in enumerate(snapshot["device_traces"])
        if (passed := _first_above(snapshot, device, trace, limit_bytes))
    ]


def _first_above(
    snapshot: Snapshot, device: int, trace: Sequence[_EntryDict], limit_bytes: int
) -> LimitPassed | None:
    changes_bytes = [_SIGN_BY_ACTION.get(entry["action"], 0) * entry["size"] for entry in trace]
    reserved_bytes = sum(
        segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device
    ) - sum(changes_bytes)
    passed: LimitPassed | None = None
    peak_bytes = reserved_bytes
    if reserved_bytes > limit_bytes:
        passed = LimitPassed(device, reserved_bytes, peak_bytes, 0, "", ())
    for entry, change_bytes in zip(trace, changes_bytes, strict=True):
        reserved_bytes += change_bytes
        peak_bytes = max(peak_bytes, reserved_bytes)
        if reserved_bytes > limit_bytes and passed is None:
            pool = POOL_NAMES.get(entry.get("pool_id", (0, 0)), "PyTorch")
            stack = tuple(
                Frame(frame["name"], frame["filename"], frame["line"])
                for frame in entry.get("frames") or ()
            )
            passed = LimitPassed(device, reserved_bytes, 0, change_bytes, pool, stack)
    return passed and replace(passed, peak_bytes=peak_bytes)
