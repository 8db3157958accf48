"""What can be known of an allocator: numbers, the trace, frees that were refused."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection
from itertools import count
from typing import Any

from cudakit.core.memory.allocator import snapshot
from cudakit.core.memory.allocator.block import Trail
from cudakit.core.memory.allocator.entrance import Entrance
from cudakit.core.memory.allocator.invalid import InvalidFree, InvalidPointer, reason_for
from cudakit.core.memory.allocator.settings import Settings
from cudakit.core.memory.allocator.tracing import Context, History
from cudakit.core.memory.allocator.upstream import Upstream

_MOST_INVALID_FREES = 1000


class Observed(Entrance):
    """The allocator of one device, as seen from outside."""

    def __init__(self, upstream: Upstream, settings: Settings, device: int) -> None:
        super().__init__(upstream, settings)
        self._device = device
        self._invalid: deque[InvalidFree] = deque(maxlen=_MOST_INVALID_FREES)
        self._invalid_numbers = count(1)

    def statistics(self) -> dict[str, int]:
        """Return the 122 numbers of torch.cuda.memory_stats."""
        with self._inside():
            return self._cache.statistics.read()

    def counters(self) -> dict[str, int]:
        """Return what PyTorch does not count."""
        with self._inside():
            known = self._cache.statistics
            return {
                "num_invalid_frees": known.num_invalid_frees,
                "num_oom_rejections": known.num_oom_rejections,
                "num_sync_rescues": known.num_sync_rescues,
            }

    def invalid_frees(self) -> tuple[InvalidFree, ...]:
        """Return the latest frees that were refused, oldest first."""
        return tuple(self._invalid)

    def reset_peaks(self) -> None:
        """Let every peak be the value now."""
        with self._inside():
            self._cache.statistics.reset_peaks()

    def reset_sums(self) -> None:
        """Begin to add up anew what was allocated and freed."""
        with self._inside():
            self._cache.statistics.reset_sums()

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

        ``context`` says whose stacks are gathered: of live blocks, of allocations, or of frees too. Raises
        UsageError for what none of these is.
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

    def set_metadata(self, text: str) -> None:
        """Write a text into every entry of the trace from now on."""
        self._recorder.metadata = text

    def snapshot(self) -> dict[str, Any]:
        """Return what is held and the trace, in PyTorch's format: plain builtin values."""
        with self._inside():
            return snapshot.take(self._cache, self._recorder, self._device)

    def _refuse_free(self, ptr: int, stack: Trail | None) -> InvalidPointer:
        reason = "it was freed from within the allocator"
        if self._guard.try_enter():
            try:
                reason = reason_for(self._cache, ptr)
            finally:
                self._guard.leave()
        self._invalid.append(InvalidFree(ptr, reason, stack))
        self._cache.statistics.num_invalid_frees = next(self._invalid_numbers)
        return InvalidPointer(
            f"nothing is allocated at {ptr:#x}: {reason}",
            hint="free each allocation once, by the address that alloc returned",
        )
