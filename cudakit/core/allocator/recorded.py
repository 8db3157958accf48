"""The trace of an allocator, and its snapshots."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from cudakit.core.allocator import saving, snapshot
from cudakit.core.allocator.counted import Counted
from cudakit.core.allocator.invalid import InvalidPointer, reason_for
from cudakit.core.allocator.tracing import Context, History, Stage, gather
from cudakit.core.allocator.upstream import Upstream
from cudakit.torch_rules.settings import Recorded as Setting
from cudakit.torch_rules.settings import Settings


class HasSnapshot(Protocol):
    """A pool of pinned memory, for snapshots."""

    def snapshot(self) -> dict[str, Any]: ...


class Recorded(Counted):
    """The allocator of one device, and what is recorded of it."""

    def __init__(self, upstream: Upstream, settings: Settings, device: int) -> None:
        super().__init__(upstream, settings, device)
        self._pinned: HasSnapshot | None = None

    def record_history(
        self,
        history: History | None = "all",
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
        with self._inside():
            recorder = self._recorder
            if history is None:
                recorder.end()
            else:
                recorder.begin(
                    history,
                    context=context,
                    max_entries=max_entries,
                    skip_actions=skip_actions,
                    clear=clear,
                )
            self._level = recorder.level
            self._cache.recorder = None if history is None else recorder
            self._let("recorded", on=history is not None)

    def set_metadata(self, text: str) -> None:
        """Write a text into every entry of the trace from now on."""
        with self._inside(flushes=False):
            self._recorder.metadata = text

    def annotate(self, ptr: int, text: str) -> None:
        """Write a text on a live allocation into the trace, such as what it is for.

        Raises InvalidPointer where nothing is allocated.
        """
        stack = gather() if self._level else None
        with self._inside():
            block = self._live.get(ptr)
            if block is None:
                raise InvalidPointer(
                    f"nothing is allocated at {ptr:#x}: {reason_for(self._cache, ptr)}"
                )
            if self._cache.recorder is not None:
                self._cache.recorder.annotate(block, stack, text)

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
        with self._inside():
            taken = snapshot.take(self._cache, self._recorder, self._device, self._own_settings())
        return taken | (self._pinned.snapshot() if self._pinned else {})

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot to a file that PyTorch's tools and `cudakit memviz` read.

        Raises UsageError where it cannot be written; what was there then stays.
        """
        place = saving.checked(path)
        saving.save(self.snapshot(), place)

    def _mark(self, name: str, stage: Stage) -> None:
        if self._cache.recorder is not None:
            with self._inside():
                self._recorder.mark(name, stage)

    def _own_settings(self) -> Mapping[str, Setting]:
        """Return what is set beside PyTorch's settings."""
        return {}
