"""The blocker: holds a stream back while work is enqueued, so that no gap between launches is measured.

As nvbench does it: a kernel spins on a flag in pinned memory. Its watchdog ends it where the host does not,
because a call waits for the very device that waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from cudakit.gpu.api import Gpu, Ptr, Stream
from cudakit.kernels.spin import Spin

# Long against what it takes to enqueue as much as a queue holds, about 1000 launches of 10 us.
LIMIT_S = 2.0
# A queue that is full lets the next launch wait: calls below this many stay clear of it.
MOST_QUEUED = 500
_WORD_BYTES = 4
# What makes every launch wait for its kernel, or kernels wait for a tool.
_HINDRANCES = ("CUDA_LAUNCH_BLOCKING", "CUDA_INJECTION64_PATH")


class Blocker:
    """Holds one stream at a time."""

    def __init__(self, gpu: Gpu, *, limit_s: float = LIMIT_S) -> None:
        self._gpu = gpu
        self._limit_ns = int(limit_s * 1e9)
        self._kernel = Spin(gpu)
        self._go = gpu.host_malloc(2 * _WORD_BYTES)
        self._late = Ptr(self._go + _WORD_BYTES)
        self._words = np.frombuffer(gpu.host_view(self._go, 2 * _WORD_BYTES), np.uint32)

    @contextmanager
    def holding(self, stream: Stream) -> Iterator[None]:
        """Let what is enqueued inside begin when all of it is. Whatever happens, the stream is let go."""
        self._words[:] = 0
        self._kernel.until(self._go, self._late, self._limit_ns, stream)
        try:
            yield
        finally:
            self._words[0] = 1

    @property
    def gave_up(self) -> bool:
        """Whether the watchdog ended the last one, which must have ended."""
        return bool(self._words[1])

    def close(self) -> None:
        """Give everything back."""
        del self._words
        self._gpu.host_free(self._go)
        self._kernel.close()


def hindrance(variables: Mapping[str, str]) -> str:
    """Name what in a process environment would let the blocker hang until its watchdog; or nothing."""
    set_ = (name for name in _HINDRANCES if variables.get(name, "0") not in ("", "0"))
    return next(set_, "")
