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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from cudakit.errors import SnapshotError
from cudakit.memory.process import (
    HOST,
    MAX_EVENTS,
    Entry,
    MemoryModel,
    NamedRange,
    ProcessMemory,
    Segment,
)
from cudakit.memory.snapshot import POOL_IDS, POOL_NAMES
from cudakit.stacks import BACKWARD_FRAME, Frame, Stack

# A snapshot as ``torch.cuda.memory._snapshot`` returns it.
Snapshot: TypeAlias = dict[str, Any]
_FrameDict: TypeAlias = dict[str, Any]

# The key of NVTX marks; memory/load/schema.py reads it.
MARKS_KEY = "cudakit_marks"

_RANGE_BEGIN_ACTIONS = ("segment_alloc", "segment_map")
_RANGE_END_ACTIONS = ("segment_free", "segment_unmap")
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
    snapshot = torch_snapshot if torch_snapshot is not None else _empty_snapshot()
    if torch_snapshot is not None:
        _attribute_backward_passes(snapshot, writer)
    torch_ranges = _TorchRanges(snapshot)
    writer.add_devices(snapshot, torch_ranges)
    writer.add_pinned(snapshot, torch_ranges)
    writer.add_ranges(snapshot)
    writer.add_marks(snapshot)
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


def _empty_snapshot() -> Snapshot:
    return {
        "segments": [],
        "device_traces": [],
        "allocator_settings": {},
        "external_annotations": [],
    }


class _Writer:
    """Converts the memory of a process to the dictionaries of a snapshot."""

    def __init__(self, memory: ProcessMemory, unix_offset_ns: int) -> None:
        self.memory = memory
        self.unix_offset_ns = unix_offset_ns
        self._frames: dict[int, list[_FrameDict]] = {}  # frames by the id() of a call stack

    def add_devices(self, snapshot: Snapshot, torch_ranges: _TorchRanges) -> None:
        """Add the segments and events that do not belong to PyTorch's allocator."""
        model = self.memory.model
        segments = [segment for segment in model.segments if segment.device != HOST]
        other_segments = [
            driver_segment
            for driver_segment in segments
            if not self._is_of_torch(driver_segment, torch_ranges)
        ]
        snapshot["segments"] = sorted(
            [*snapshot["segments"], *map(self._segment_entry, other_segments)],
            key=itemgetter("address"),
        )
        traces = snapshot.setdefault("device_traces", [])
        devices = [device for device in model.entries if device != HOST]
        while len(traces) <= max(
            [*devices, *(driver_segment.device for driver_segment in other_segments)], default=-1
        ):
            traces.append([])
        overflow_flags = [len(trace) >= MAX_EVENTS for trace in traces]
        for device in devices:
            recorded_entries = self._trace_entries(model, device, torch_ranges)
            has_overflowed = device in model.overflowed_devices and bool(recorded_entries)
            traces[device], overflow_flags[device] = _merge_traces(
                traces[device],
                recorded_entries,
                overflow_flags=(overflow_flags[device], has_overflowed),
            )
        snapshot["trace_alloc_overflowed"] = overflow_flags

    def add_pinned(self, snapshot: Snapshot, torch_ranges: _TorchRanges) -> None:
        """Add pinned host memory, unless PyTorch's own snapshot contains it."""
        model = self.memory.model
        if (
            snapshot.get("host_traces")
            or snapshot.get("host_segments")
            or HOST not in model.entries
        ):
            return
        pinned_segments = [segment for segment in model.segments if segment.device == HOST]
        snapshot["host_segments"] = [
            self._host_segment_entry(segment) for segment in pinned_segments
        ]
        snapshot["host_traces"] = self._trace_entries(model, HOST, torch_ranges)

    def add_ranges(self, snapshot: Snapshot) -> None:
        """Add named ranges as annotations of every device that has a trace."""
        devices = [
            device_number for device_number, trace in enumerate(snapshot["device_traces"]) if trace
        ]
        annotations = [
            {
                "name": named_range.name,
                "stage": stage,
                "device": device,
                "time_us": self.unix_us(time_ns),
            }
            for named_range in self.memory.ranges
            for stage, time_ns in (
                ("START", named_range.begin_ns),
                ("END", named_range.end_ns),
            )
            if time_ns is not None
            for device in devices
        ]
        all_annotations = snapshot.setdefault("external_annotations", [])
        all_annotations += annotations
        if annotations and all(
            isinstance(annotation.get("time_us"), int) for annotation in all_annotations
        ):
            all_annotations.sort(key=itemgetter("time_us"))

    def add_marks(self, snapshot: Snapshot) -> None:
        """Add the marks to every device that has a trace, under a key that PyTorch does not have."""
        devices = [
            device_number for device_number, trace in enumerate(snapshot["device_traces"]) if trace
        ]
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
        return (time_ns + self.unix_offset_ns) // 1000

    def _is_of_torch(self, segment: Segment, torch_ranges: _TorchRanges) -> bool:
        end_us = None if segment.end_ns is None else self.unix_us(segment.end_ns)
        return torch_ranges.includes_segment(segment, self.unix_us(segment.begin_ns), end_us)

    def _trace_entries(
        self, model: MemoryModel, device: int, torch_ranges: _TorchRanges
    ) -> list[dict[str, Any]]:
        """Return the events of a device without those of PyTorch's segments."""
        is_of_torch: dict[int, bool] = {}  # key: the id() of a segment
        entries = []
        for trace_entry in model.entries[device]:
            segment = trace_entry.segment
            if id(segment) not in is_of_torch:
                is_of_torch[id(segment)] = self._is_of_torch(segment, torch_ranges)
            is_dropped = trace_entry.is_segment_as_block and not segment.is_undivided
            if not is_of_torch[id(segment)] and not is_dropped:
                entries.append(self._trace_entry(trace_entry))
        entries.sort(key=itemgetter("time_us"))
        return entries

    def _trace_entry(self, entry: Entry) -> dict[str, Any]:
        return {
            "action": entry.action,
            "device_free" if entry.action == "oom" else "addr": entry.address,
            "size": entry.size_bytes,
            "stream": entry.segment.stream,
            "time_us": self.unix_us(entry.time_ns),
            "compile_context": "N/A",
            "user_metadata": entry.segment.pool,
            "pool_id": POOL_IDS.get(entry.segment.pool, (0, 0)),
            "frames": self.frames(entry.stack),
        }

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

    def _block_entries(self, segment: Segment) -> Iterable[dict[str, Any]]:
        """Yield the blocks of a segment by address, with the free ranges between them."""
        if segment.is_undivided:
            segment_bytes = segment.size_bytes
            yield _block_entry(
                segment.address, segment_bytes, segment.requested_bytes, self.frames(segment.stack)
            )
            return
        end_address = segment.address
        blocks = sorted(segment.blocks.items())
        next_addresses = [*(address for address, _ in blocks[1:]), segment.end]
        for (address, block), next_address in zip(blocks, next_addresses, strict=False):
            if address > end_address:
                yield _block_entry(end_address, address - end_address, 0, [])
            # A pool may round less than the model: JAX and RMM round to 256 bytes.
            segment_bytes = min(block.size_bytes, next_address - address)
            yield _block_entry(
                address, segment_bytes, block.requested_bytes, self.frames(block.stack)
            )
            end_address = address + segment_bytes
        if segment.end > end_address:
            yield _block_entry(end_address, segment.end - end_address, 0, [])

    def _host_segment_entry(self, segment: Segment) -> dict[str, Any]:
        return {
            "address": segment.address,
            "size": segment.size_bytes,
            "requested_size": segment.requested_bytes,
            "allocated": 1,
            "active": 1,
            "segment_pool_id": POOL_IDS.get(segment.pool, (0, 0)),
            "frames": self.frames(segment.stack),
        }


def _block_entry(
    address: int, size_bytes: int, requested_bytes: int, frames: list[_FrameDict]
) -> dict[str, Any]:
    """Return a block in the format of a snapshot; the block is free if ``requested_bytes`` is 0."""
    return {
        "address": address,
        "size": size_bytes,
        "requested_size": requested_bytes,
        "state": "active_allocated" if requested_bytes else "inactive",
        "frames": frames,
    }


def _merge_traces(
    torch_entries: list[dict[str, Any]],
    recorded_entries: list[dict[str, Any]],
    *,
    overflow_flags: tuple[bool, bool],
) -> tuple[list[dict[str, Any]], bool]:
    """Merge two traces by time, and return whether old events are missing.

    If one trace lost its old events, the older events of the other trace are dropped too, because a trace
    must be complete from its first event.
    """
    if not torch_entries or not all("time_us" in trace_entry for trace_entry in torch_entries):
        return [*torch_entries, *recorded_entries], any(overflow_flags)
    entries_and_flags = zip((torch_entries, recorded_entries), overflow_flags, strict=True)
    begin_us = max(
        (trace[0]["time_us"] for trace, has_overflowed in entries_and_flags if has_overflowed),
        default=0,
    )
    complete_traces = (
        [trace_entry for trace_entry in trace if trace_entry["time_us"] >= begin_us]
        for trace in (torch_entries, recorded_entries)
    )
    return list(merge(*complete_traces, key=itemgetter("time_us"))), any(overflow_flags)


# --- memory of PyTorch


@dataclass(frozen=True, slots=True)
class _TorchRange:
    """An address range of PyTorch's allocator, and the time in which it was reserved."""

    begin: int  # first address of the range
    end: int  # first address after the range
    begin_us: (
        float  # Unix time of the driver allocation in microseconds; -_NEVER if before the trace
    )
    end_us: float  # Unix time of the free in microseconds; _NEVER if not freed


class _TorchRanges:
    """All address ranges that PyTorch's allocator got from the driver, with their times."""

    def __init__(self, snapshot: Snapshot) -> None:
        ranges: list[_TorchRange] = []
        for trace in snapshot.get("device_traces", []):
            ranges += _ranges_of_trace(trace)
        ranges_of_trace = {(torch_range.begin, torch_range.end_us) for torch_range in ranges}
        for segment in snapshot["segments"]:
            address, segment_bytes = segment["address"], segment["total_size"]
            if (address, _NEVER) not in ranges_of_trace:
                ranges.append(_TorchRange(address, address + segment_bytes, -_NEVER, _NEVER))
        self._ranges = sorted(ranges, key=lambda torch_range: torch_range.begin)
        self._begin_addresses = [torch_range.begin for torch_range in self._ranges]
        self._longest_bytes = max(
            (torch_range.end - torch_range.begin for torch_range in ranges), default=0
        )

    def includes_segment(self, segment: Segment, begin_us: float, end_us: float | None) -> bool:
        """Return whether PyTorch's allocator made a driver allocation, given as a segment and its times.

        The two clocks differ by microseconds, and PyTorch records a segment some time after the driver. So
        the two intervals in time must overlap by half of the shorter one.
        """
        end_us = _NEVER if end_us is None else end_us
        first_index = bisect_left(self._begin_addresses, segment.address - self._longest_bytes)
        end_index = bisect_right(self._begin_addresses, segment.end - 1)
        return any(
            torch_range.end > segment.address and _overlap(torch_range, begin_us, end_us)
            for torch_range in self._ranges[first_index:end_index]
        )


# A Unix time in microseconds, later than any event, yet finite, so that differences are defined.
_NEVER = 1e18


def _overlap(range_: _TorchRange, begin_us: float, end_us: float) -> bool:
    """Return whether two intervals in time share at least half of the shorter one."""
    shared_us = min(range_.end_us, end_us) - max(range_.begin_us, begin_us)
    shorter_us = min(range_.end_us - range_.begin_us, end_us - begin_us)
    return shared_us > 0 and shared_us >= shorter_us / 2


def _ranges_of_trace(trace: Sequence[Mapping[str, Any]]) -> list[_TorchRange]:
    """Return the address ranges whose allocation or free is in a trace."""
    ranges: list[_TorchRange] = []
    open_ranges: dict[int, tuple[int, float]] = {}
    for trace_entry in trace:
        action, address = trace_entry["action"], trace_entry.get("addr", 0)
        time_us = trace_entry.get("time_us", 0)
        if action in _RANGE_BEGIN_ACTIONS:
            open_ranges[address] = (trace_entry["size"], time_us)
        elif action in _RANGE_END_ACTIONS:
            range_bytes, begin_us = open_ranges.pop(address, (trace_entry["size"], -_NEVER))
            ranges.append(_TorchRange(address, address + range_bytes, begin_us, time_us))
    for address, (range_bytes, begin_us) in open_ranges.items():
        ranges.append(_TorchRange(address, address + range_bytes, begin_us, _NEVER))
    return ranges


def _attribute_backward_passes(snapshot: Snapshot, writer: _Writer) -> None:
    """Give memory without a call stack the stack of the backward pass that allocated this memory.

    Autograd's threads have no Python frames. Memory that was allocated while two
    backward passes ran gets no call stack.
    """
    backward_passes = _BackwardPasses(writer)
    if backward_passes.is_empty:
        return
    for device, trace in enumerate(snapshot.get("device_traces", [])):
        frames_by_address: dict[int, list[_FrameDict]] = {}
        for trace_entry in trace:
            if not trace_entry.get("frames") and "time_us" in trace_entry:
                trace_entry["frames"] = backward_passes.frames_at(trace_entry["time_us"])
            if trace_entry["action"] == "alloc":
                frames_by_address[trace_entry["addr"]] = trace_entry.get("frames") or []
        for segment in snapshot["segments"]:
            for block in segment["blocks"] if segment["device"] == device else ():
                if not block.get("frames") and block["state"] != "inactive":
                    block["frames"] = list(frames_by_address.get(block.get("address"), []))


class _BackwardPasses:
    """The backward passes of a process, for queries by time."""

    def __init__(self, writer: _Writer) -> None:
        backward_ranges = [
            backward_pass
            for backward_pass in writer.memory.ranges
            if backward_pass.is_backward_pass
        ]
        begins_and_ends = sorted(
            (time_us, count_change, index)
            for index, backward_pass in enumerate(backward_ranges)
            for time_us, count_change in _begin_and_end(backward_pass, writer)
        )
        self._change_times: list[int] = []
        # Item i is the call stack from _times[i] until _times[i + 1].
        self._frames: list[list[_FrameDict]] = []
        active_passes: set[int] = set()
        for time_us, count_change, index in begins_and_ends:
            active_passes.add(index) if count_change > 0 else active_passes.discard(index)
            stack = (
                backward_ranges[next(iter(active_passes))].stack if len(active_passes) == 1 else ()
            )
            self._change_times.append(time_us)
            self._frames.append([_BACKWARD_FRAME, *writer.frames(stack)] if stack else [])

    @property
    def is_empty(self) -> bool:
        return not self._change_times

    def frames_at(self, time_us: int) -> list[_FrameDict]:
        """Return the call stack of the only backward pass at a time; empty without one."""
        index = bisect_right(self._change_times, time_us) - 1
        return list(self._frames[index]) if index >= 0 else []


def _begin_and_end(backward_pass: NamedRange, writer: _Writer) -> Iterable[tuple[int, int]]:
    """Yield the Unix times in microseconds at which a pass begins (with 1) and ends (with -1)."""
    yield writer.unix_us(backward_pass.begin_ns), 1
    if backward_pass.end_ns is not None:
        yield writer.unix_us(backward_pass.end_ns), -1


# --- Find the allocation at which a program exceeded a limit of reserved device memory -------------

# The sign of the change of reserved memory by the action of an event.
_SIGN_BY_ACTION = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


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


def find_limit_passed(snapshot: dict[str, Any], limit_bytes: int) -> list[LimitPassed]:
    """Return the first moment above the limit for each device that exceeded the limit.

    Reserved memory is the sum of the segments of all allocators in the process, without the CUDA context.
    """
    passed_limits = (
        _first_above(device, trace, _reserved_at_end(snapshot, device), limit_bytes)
        for device, trace in enumerate(snapshot["device_traces"])
    )
    return [limit_passed for limit_passed in passed_limits if limit_passed]


def _reserved_at_end(snapshot: dict[str, Any], device: int) -> int:
    """Return the number of bytes of a device that are reserved at the end of the trace."""
    return sum(
        segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device
    )


def _first_above(
    device: int, trace: Sequence[dict[str, Any]], reserved_at_end: int, limit_bytes: int
) -> LimitPassed | None:
    changes_bytes = [
        _SIGN_BY_ACTION.get(trace_entry["action"], 0) * trace_entry["size"] for trace_entry in trace
    ]
    reserved_bytes = reserved_at_end - sum(changes_bytes)
    first_passed: LimitPassed | None = None
    peak_bytes = reserved_bytes
    if reserved_bytes > limit_bytes:
        first_passed = LimitPassed(device, reserved_bytes, peak_bytes, 0, "", ())
    for trace_entry, change_bytes in zip(trace, changes_bytes, strict=True):
        reserved_bytes += change_bytes
        peak_bytes = max(peak_bytes, reserved_bytes)
        if reserved_bytes > limit_bytes and first_passed is None:
            pool = POOL_NAMES.get(trace_entry.get("pool_id", (0, 0)), "PyTorch")
            first_passed = LimitPassed(
                device, reserved_bytes, 0, change_bytes, pool, _stack_of_entry(trace_entry)
            )
    if first_passed is None:
        return None
    return LimitPassed(
        device,
        first_passed.reserved_bytes,
        peak_bytes,
        first_passed.size_bytes,
        first_passed.pool,
        first_passed.stack,
    )


def _stack_of_entry(entry: dict[str, Any]) -> Stack:
    return tuple(
        Frame(frame["name"], frame["filename"], frame["line"])
        for frame in entry.get("frames") or ()
    )
