"""What can be known of a pool of pinned memory: numbers, the trace, what it holds."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

from cudakit.core.allocator.history import Context, Level, Recorded
from cudakit.core.allocator.pinned import snapshot
from cudakit.core.allocator.pinned.blocks import HostBlock
from cudakit.core.allocator.pinned.entrance import HostEntrance


class HostObserved(HostEntrance):
    """A pool of pinned memory, as seen from outside."""

    def statistics(self) -> dict[str, int]:
        """Return the 28 numbers of torch.cuda.host_memory_stats; times are in microseconds."""
        with self._inside():
            return self._statistics.read()

    def counters(self) -> dict[str, int]:
        """Return what PyTorch does not count; ``waiting_bytes`` were freed while streams use them."""
        with self._inside():
            return self._counters()

    def waiting(self) -> dict[int, int]:
        """Return for each stream the bytes of freed blocks that wait for it."""
        with self._inside():
            found: dict[int, int] = {}
            for stream, block in self._awaited():
                found[stream] = found.get(stream, 0) + block.size
            return found

    def reset_peaks(self) -> None:
        """Let every peak be the value now."""
        with self._inside():
            self._statistics.reset_peaks()

    def reset_sums(self) -> None:
        """Begin to add up anew what was allocated and freed."""
        with self._inside():
            self._statistics.reset_sums()

    def record_history(
        self,
        history: Recorded | None = "all",
        *,
        context: Context | None = "all",
        max_entries: int = sys.maxsize,
        skip_actions: Collection[str] = (),
        clear: bool = False,
    ) -> None:
        """Record a trace from now on, or none; as for memory of the device.

        Raises UsageError for what cannot be.
        """
        with self._inside():
            self._recorder.configure(
                history,
                context=context,
                max_entries=max_entries,
                skip_actions=skip_actions,
                clear=clear,
            )
            self._records = history is not None
            self._level = self._recorder.level if self._records else Level.NONE

    def snapshot(self) -> dict[str, Any]:
        """Return ``host_segments`` and ``host_traces`` of PyTorch's format: plain builtin values."""
        with self._inside():
            used = [*self._live.values(), *(block for block, _ in list(self._guard.late))]
            owners = {block: self._pool(block).id for block in used}
            owners |= {block: pool.id for pool in self._pools for block in pool}
            return snapshot.take(owners, self._recorder)

    def _counters(self) -> dict[str, int]:
        known = self._statistics
        waiting = {block.ptr: block.size for _, block in self._awaited()}
        return {
            "num_free_failures": known.num_free_failures,
            "num_invalid_frees": known.num_invalid_frees,
            "num_rescues": known.num_rescues,
            "captured_bytes": sum(block.size for pool in self._pools for block in pool.kept),
            "free_bytes": sum(block.size for pool in self._pools for block in pool.store),
            "waiting_bytes": sum(waiting.values()),
        }

    def _awaited(self) -> Iterator[tuple[int, HostBlock]]:
        """Go through the streams that freed blocks wait for, and the block of each."""
        for pool in self._pools:
            yield from pool.waiting
