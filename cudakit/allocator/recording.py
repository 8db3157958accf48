"""Recording: the history of an allocator, snapshots in PyTorch's format, and snapshot files.

A snapshot has the format of torch.cuda.memory._snapshot, and consists of builtin types only. Source:
torch/csrc/cuda/Module.cpp (torch_cuda_memorySnapshot) and torch/cuda/memory.py. The key internal_metadata
comes from pull request 193432 of PyTorch.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from cudakit.allocator.blocks import Block
from cudakit.allocator.engine import Engine
from cudakit.allocator.history import (
    OOM,
    SNAPSHOT,
    Annotation,
    Context,
    History,
    Recorded,
    Stacks,
    Stage,
    TraceEvent,
    gather_stack,
)
from cudakit.allocator.segments import Segment
from cudakit.allocator.state import AllocatorState, InvalidPointer
from cudakit.errors import UsageError
from cudakit.torch_rules.settings import RecordedValue as RecordedSetting


class HasSnapshot(Protocol):
    """An allocator of pinned memory that adds keys to snapshots."""

    def snapshot(self) -> dict[str, Any]: ...


class Recording:
    """The methods of an allocator for history and snapshots.

    ``cudakit_settings`` returns the settings that PyTorch does not have.
    """

    def __init__(
        self, state: AllocatorState, cudakit_settings: Callable[[], Mapping[str, RecordedSetting]]
    ) -> None:
        self._state = state
        self._cudakit_settings = cudakit_settings
        self._pinned_allocator: HasSnapshot | None = None

    def record_history(
        self,
        history: Recorded | None = "all",
        *,
        context: Context | None = "all",
        max_entries: int = sys.maxsize,
        skip_actions: Collection[str] = (),
        clear: bool = False,
    ) -> None:
        """Start or stop the recording of history, like torch.cuda.memory._record_memory_history.

        ``history`` is "all", "state" (live blocks only) or None to stop. Recorded events stay until
        ``clear``; PyTorch drops them when recording stops. ``context`` selects the events with call stacks:
        "state" (live blocks), "alloc" (also allocations in the trace), "all" (also frees) or None. Raises
        UsageError for an invalid setting.
        """
        state = self._state
        with state.locked():
            state.history.configure(
                history,
                context=context,
                max_entries=max_entries,
                skip_actions=skip_actions,
                clear=clear,
            )
            previous_events = state.history if state.history.is_enabled else None
            state.set_slow("history", is_on=not state.fast_path.record_events(previous_events))

    def set_metadata(self, text: str) -> None:
        """Set the text of the key ``user_metadata`` in all later entries of the trace."""
        with self._state.locked():
            self._state.history.metadata = text

    def annotate(self, ptr: int, text: str) -> None:
        """Add an entry to the trace with a text about a live allocation, such as its purpose.

        Raises InvalidPointer if no live allocation begins at ``ptr``.
        """
        state = self._state
        stack = gather_stack(2) if state.history.level else None
        with state.locked():
            block = state.live_blocks.get(ptr)
            if block is None:
                raise InvalidPointer(
                    f"nothing is allocated at {ptr:#x}: {state.describe_invalid_pointer(ptr)}"
                )
            if state.history.is_enabled:
                state.history.annotate(block, stack, text)

    @contextmanager
    def annotated(self, name: str) -> Iterator[None]:
        """Record a named range of the program, such as a step, in ``external_annotations`` of snapshots."""
        self._record_mark(name, "START")
        try:
            yield
        finally:
            self._record_mark(name, "END")

    def include_pinned(self, pool: HasSnapshot | None) -> None:
        """Include ``host_segments`` and ``host_traces`` of a pinned memory allocator in snapshots."""
        self._pinned_allocator = pool

    def snapshot(self) -> dict[str, Any]:
        """Return the segments and the trace in PyTorch's format, as builtin types."""
        state = self._state
        with state.locked():
            snapshot = _snapshot(
                state.engine, state.history, state.device, self._cudakit_settings()
            )
        return snapshot | (self._pinned_allocator.snapshot() if self._pinned_allocator else {})

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot to a file that PyTorch's tools and `cudakit memviz` read.

        Raises UsageError if the file cannot be written; an existing file then stays.
        """
        snapshot_path = checked_path(path)
        save_snapshot(self.snapshot(), snapshot_path)

    def _record_mark(self, name: str, stage: Stage) -> None:
        if self._state.history.is_enabled:
            with self._state.locked():
                self._state.history.mark(name, stage)


def _snapshot(
    engine: Engine, history: History, device: int, settings: Mapping[str, RecordedSetting]
) -> dict[str, Any]:
    """Return all segments and the trace, and then append an event SNAPSHOT to the history.

    ``settings`` are the settings that PyTorch does not have.
    """
    stacks = Stacks()
    entries = [_trace_entry(history, stacks, trace_event) for trace_event in history.events]
    sorted_segments = sorted(engine.segments.values(), key=lambda segment: segment.ptr)
    segments = [_segment_entry(segment, stacks, device) for segment in sorted_segments]
    if engine.history is not None:
        engine.history.record(SNAPSHOT, 0, engine.stats.current_total("active_bytes"), 0, None)
    empty_traces: list[list[Any]] = [[] for _ in range(device)]
    return {
        "segments": segments,
        "device_traces": [*empty_traces, entries],
        "allocator_settings": engine.settings.as_recorded() | dict(settings),
        "external_annotations": [
            _annotation_entry(history, annotation, device) for annotation in history.annotations
        ],
        "trace_alloc_overflowed": [*(False for _ in empty_traces), history.overflowed],
    }


def _trace_entry(history: History, stacks: Stacks, trace_event: TraceEvent) -> dict[str, Any]:
    """Convert an event of the history to an entry of a snapshot's trace."""
    action, address, size_bytes, stream, moment_ns, stack, pool, metadata = trace_event
    metadata_text, tag = metadata if isinstance(metadata, tuple) else (metadata, "")
    trace_entry = {
        "action": action,
        "device_free" if action == OOM else "addr": address,
        "size": size_bytes,
        "stream": stream,
        "time_us": history.unix_us(moment_ns),
        "compile_context": "N/A",
        "user_metadata": metadata_text,
        "pool_id": pool,
    }
    if tag:
        trace_entry["internal_metadata"] = tag
    if stack:
        trace_entry["frames"] = stacks.frames(stack)
    return trace_entry


def host_snapshot(blocks: Iterable[Block], history: History) -> dict[str, Any]:
    """Return ``host_segments``, with one segment per block, and ``host_traces``.

    PyTorch 2.14 never splits a host segment, and records the bytes in use of each segment
    (c10/core/CachingDeviceAllocator.h). Here each block of a split segment is recorded as a segment.
    """
    stacks = Stacks()
    return {
        "host_segments": [
            {
                "address": block.ptr,
                "size": block.size,
                "requested_size": 0 if block.is_free else block.requested,
                "allocated": int(block.is_allocated),
                "active": int(not block.is_free),
                "segment_pool_id": block.pool.id,
                "frames": stacks.frames(block.stack),
            }
            for block in sorted(blocks, key=lambda block: block.ptr)
        ],
        "host_traces": [
            _trace_entry(history, stacks, trace_event) for trace_event in history.events
        ],
    }


def _annotation_entry(history: History, annotation: Annotation, device: int) -> dict[str, Any]:
    name, stage, moment_ns = annotation
    return {
        "name": name,
        "stage": stage,
        "device": device,
        "time_us": history.unix_us(moment_ns),
    }


def _segment_entry(segment: Segment, stacks: Stacks, device: int) -> dict[str, Any]:
    blocks = segment.blocks()
    active_blocks = [block for block in blocks if not block.is_free]
    return {
        "device": device,
        "address": segment.ptr,
        "total_size": segment.size,
        "allocated_size": sum(block.size for block in active_blocks if block.is_allocated),
        "active_size": sum(block.size for block in active_blocks),
        "requested_size": sum(block.requested for block in active_blocks),
        "stream": segment.stream,
        "segment_type": "small" if segment.pool.is_small else "large",
        "segment_pool_id": segment.pool.id,
        "is_expandable": segment.is_expandable,
        "registration_counter": segment.registration_number,
        "frames": stacks.frames(segment.stack),
        "blocks": [_block_entry(block, stacks) for block in blocks],
    }


def _block_entry(block: Block, stacks: Stacks) -> dict[str, Any]:
    return {
        "address": block.ptr,
        "size": block.size,
        "requested_size": block.requested,
        "state": _block_state(block),
        "frames": stacks.frames(block.stack),
    }


def _block_state(block: Block) -> str:
    if block.is_free:
        return "inactive"
    return "active_allocated" if block.is_allocated else "active_pending_free"


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return a path as an absolute path. Raises UsageError if no file can be written there."""
    absolute_path = Path(
        path
    ).absolute()  # Absolute, because the program may change its working directory.
    if absolute_path.is_dir():
        raise UsageError(
            f"cannot write {absolute_path}: it is a directory", hint="give a file name"
        )
    if not absolute_path.parent.is_dir():
        raise UsageError(
            f"cannot write {absolute_path}: there is no directory {absolute_path.parent}",
            hint="make it first",
        )
    return absolute_path


def save_snapshot(snapshot: dict[str, Any], path: Path) -> None:
    """Write a snapshot to a file. Raises UsageError if that fails; an existing file then stays unchanged."""
    # The name is random and the mode is "x", because another user could place a symbolic link at a known
    # name.
    temporary_path = path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")
    try:
        try:
            with temporary_path.open("xb") as file:
                pickle.dump(snapshot, file, protocol=4)
            temporary_path.replace(path)
        finally:
            temporary_path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="choose another path, or free disk space"
        ) from error
