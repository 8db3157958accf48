"""Who is told what an allocator does."""

from __future__ import annotations

import os

from cudakit.core.allocator.monitors import Callback, Direction, Held, Monitor, Monitors
from cudakit.core.allocator.oom import OutOfMemory
from cudakit.core.allocator.recorded import Recorded
from cudakit.core.allocator.saving import Saver
from cudakit.core.allocator.upstream import Upstream
from cudakit.core.allocator.witnesses import Asker, Observer, Witnesses
from cudakit.torch_rules.oom_facts import OomReport
from cudakit.torch_rules.settings import Settings


class Observed(Recorded):
    """The allocator of one device, as seen from outside."""

    def __init__(self, upstream: Upstream, settings: Settings, device: int) -> None:
        super().__init__(upstream, settings, device)
        self._monitors = Monitors(self._cache.statistics.total, device)
        self._witnesses = Witnesses()

    def monitor(
        self,
        metric: Held,
        threshold: int | float,  # bytes, or a share
        callback: Callback,
        *,
        direction: Direction = "up",
    ) -> Monitor:
        """Call a function when what is reserved, allocated or active crosses a threshold.

        ``threshold`` is bytes, or as a float a share of the device's memory. It is crossed up when as much
        as that is held, and down when less is. The call comes right after the one that crossed it, in the
        same thread, and may allocate and free; what it raises goes to ``sys.unraisablehook``. Raises
        UsageError for what cannot be watched.
        """
        threshold_bytes = self._bytes_of(threshold)
        with self._inside():
            made = self._monitors.add(metric, threshold_bytes, callback, direction)
            self._watch(self._look)
            return made

    def on_out_of_memory(self, observer: Observer) -> None:
        """Tell a function of every request that fails, before the error is raised.

        What it raises is a note on that error. Of those that are refused untried ``on_rejection`` tells.
        """
        self._witnesses.observers.append(observer)

    def on_rejection(self, observer: Observer) -> None:
        """Tell a function of every request that throw_on_cudamalloc_oom refuses, before the error is raised.

        They are beyond the memory fraction; nothing was given back for them, and no snapshot is saved. The
        report has what PyTorch tells its OomRejectionObserver: ``device``, ``segment_bytes``,
        ``reserved_bytes``, ``device_total_bytes``. What the function raises is a note on the error.
        """
        self._witnesses.of_rejections.append(observer)

    def save_on_out_of_memory(self, path: str | os.PathLike[str] | None) -> None:
        """Write a snapshot to a file when memory has run out, before the error is raised; None: no more.

        The latest replaces those before. Where it cannot be written, a note on the error says so. Requests
        that are refused untried (``on_rejection``) write none. Raises UsageError now for what is no place for
        a file.
        """
        self._witnesses.saver = None if path is None else Saver(self.snapshot, path)

    def ask_processes(self, asker: Asker | None) -> None:
        """Let the report of memory that has run out have what a function says of the device's processes."""
        self._witnesses.asker = asker

    def _out_of_memory(self, report: OomReport) -> OutOfMemory:
        """Tell everybody, and return the error. The guard is held, but not meanwhile."""
        self._guard.leave()
        try:
            return self._witnesses.error(report)
        finally:
            self._guard.enter()

    def _look(self) -> None:
        if self._monitors.watching:
            self._monitors.look()
        elif self._guard.try_enter():  # since a monitor may be made right now
            try:
                if not self._monitors.watching:
                    self._unwatch(self._look)
            finally:
                self._guard.leave()
                self._drain()

    def _bytes_of(self, threshold: int | float) -> int:
        if isinstance(threshold, int):
            return threshold
        return int(threshold * self._upstream.memory_info().total_bytes)
