"""Recording: the history of an allocator, snapshots, and files of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from cudakit.core.allocator import snapshot
from cudakit.core.allocator.history import Context, Level, Recorded, Stage, gather
from cudakit.core.allocator.state import AllocatorState, InvalidPointer
from cudakit.torch_rules.settings import Recorded as RecordedSetting


class HasSnapshot(Protocol):
    """A pool of pinned memory, for snapshots."""

    def snapshot(self) -> dict[str, Any]: ...


class Recording:
    """The calls of an allocator for its history and snapshots.

    ``own_settings`` returns the settings that PyTorch does not have.
    """

    def __init__(
        self, state: AllocatorState, own_settings: Callable[[], Mapping[str, RecordedSetting]]
    ) -> None:
        self._state = state
        self._own_settings = own_settings
        self._pinned: HasSnapshot | None = None

    def record_history(
        self,
        history: Recorded | None = "all",
        *,
        context: Context | None = "all",
        max_entries: int = sys.maxsize,
        skip_actions: Collection[str] = (),
        clear: bool = False,
    ) -> None:
        """Record a trace from now on, or none; as torch.cuda.memory._record_memory_history.

        What was recorded stays until ``clear``; PyTorch forgets it when recording ends. ``context`` says
        whose stacks are gathered: of live blocks, of allocations, or of frees too. Raises UsageError for what
        none of these is.
        """
        state = self._state
        with state.inside():
            state.history.configure(
                history,
                context=context,
                max_entries=max_entries,
                skip_actions=skip_actions,
                clear=clear,
            )
            recorded = state.history
            state.fast_path.record_events(recorded if recorded.enabled else None)
            has_details = recorded.level > Level.NONE or bool(recorded.skipped)
            state.set_slow("history", on=recorded.enabled and has_details)

    def set_metadata(self, text: str) -> None:
        """Write a text into every entry of the trace from now on."""
        with self._state.inside(flushes=False):
            self._state.history.metadata = text

    def annotate(self, ptr: int, text: str) -> None:
        """Write a text on a live allocation into the trace, such as what it is for.

        Raises InvalidPointer where nothing is allocated.
        """
        state = self._state
        stack = gather() if state.history.level else None
        with state.inside():
            block = state.live.get(ptr)
            if block is None:
                raise InvalidPointer(f"nothing is allocated at {ptr:#x}: {state.reason_for(ptr)}")
            if state.history.enabled:
                state.history.annotate(block, stack, text)

    @contextmanager
    def annotated(self, name: str) -> Iterator[None]:
        """Name what the program does within, such as a step: ``external_annotations`` of snapshots."""
        self._mark(name, "START")
        try:
            yield
        finally:
            self._mark(name, "END")

    def include_pinned(self, pool: HasSnapshot | None) -> None:
        """Let snapshots have ``host_segments`` and ``host_traces`` of a pool of pinned memory too."""
        self._pinned = pool

    def snapshot(self) -> dict[str, Any]:
        """Return what is held and the trace, in PyTorch's format: plain builtin values."""
        state = self._state
        with state.inside():
            taken = snapshot.take(state.engine, state.history, state.device, self._own_settings())
        return taken | (self._pinned.snapshot() if self._pinned else {})

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot to a file that PyTorch's tools and `cudakit memviz` read.

        Raises UsageError where it cannot be written; what was there then stays.
        """
        place = snapshot.checked(path)
        snapshot.save(self.snapshot(), place)

    def _mark(self, name: str, stage: Stage) -> None:
        if self._state.history.enabled:
            with self._state.inside():
                self._state.history.mark(name, stage)
