"""Work that lasts until it is let go, or for two seconds where somebody waits for the whole device."""

from __future__ import annotations

import numpy as np

from cudakit.gpu.api import Gpu, Ptr, Stream

MOST_NS = 2_000_000_000
SOURCE = """
extern "C" __global__ void gate(volatile unsigned *open, unsigned ticket, unsigned long long most_ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (*open < ticket && now - begin < most_ns);
}
"""


class Gate:
    """A stream of its own, ``lane``, that others wait for."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.lane: Stream = gpu.stream(blocking=False)
        self._kernel = gpu.kernel(gpu.load(gpu.compile(SOURCE)), "gate")
        self._word: Ptr = gpu.host_malloc(64)  # pinned: the device reads it at the same address
        self._open = np.frombuffer(gpu.host_view(self._word, 64), dtype=np.uint32)
        self._open[0] = 0
        self._ticket = 0

    def close(self) -> None:
        """Let the lane wait from now on."""
        self._ticket += 1
        self._launch(self._ticket, self.lane)

    def pass_through(self, stream: Stream) -> None:
        """Give a stream a kernel that waits for nothing."""
        self._launch(0, stream)

    def open(self) -> None:
        """Let the lane go on, and wait until it has."""
        self._open[0] = self._ticket
        self._gpu.sync_stream(self.lane)

    def _launch(self, ticket: int, stream: Stream) -> None:
        arguments = (self._word, np.uint32(ticket), np.uint64(MOST_NS))
        self._gpu.launch(self._kernel, (1, 1, 1), (1, 1, 1), arguments, stream)
