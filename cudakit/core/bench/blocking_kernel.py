"""The blocking kernel: holds a stream until work is enqueued, so that no launch gap is measured.

As in nvbench, a kernel spins on a flag in pinned memory. Its watchdog ends the kernel if the host cannot set
the flag, because one of its calls waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from cudakit.gpu.api import ComputeDevice, Ptr, Stream
from cudakit.kernels.spin import Spin

# Long compared with enqueueing as much as a queue holds, about 1000 launches of 10 us.
LIMIT_S = 2.0
# A full queue makes the next launch wait: fewer calls than this are enqueued at once.
MOST_QUEUED = 500
_WORD_BYTES = 4
# Variables that make every launch wait for its kernel, or kernels wait for a tool.
_DISABLING = ("CUDA_LAUNCH_BLOCKING", "CUDA_INJECTION64_PATH")


class BlockingKernel:
    """Blocks one stream at a time."""

    def __init__(self, gpu: ComputeDevice, *, limit_s: float = LIMIT_S) -> None:
        self._gpu = gpu
        self._limit_ns = int(limit_s * 1e9)
        self._kernel = Spin(gpu)
        self._go = gpu.host_malloc(2 * _WORD_BYTES)
        self._late = Ptr(self._go + _WORD_BYTES)
        self._words = np.frombuffer(gpu.host_view(self._go, 2 * _WORD_BYTES), np.uint32)

    @contextmanager
    def blocking(self, stream: Stream) -> Iterator[None]:
        """Block a stream while the body enqueues work on it, and release it in any case."""
        self._words[:] = 0
        self._kernel.until(self._go, self._late, self._limit_ns, stream)
        try:
            yield
        finally:
            self._words[0] = 1

    @property
    def timed_out(self) -> bool:
        """Whether the watchdog ended the last kernel, which must have finished."""
        return bool(self._words[1])

    def close(self) -> None:
        """Free the flag and unload the kernel."""
        del self._words
        self._gpu.host_free(self._go)
        self._kernel.close()


def disabling_variable(variables: Mapping[str, str]) -> str:
    """Return the environment variable that would make the blocking kernel time out, or ""."""
    set_ = (name for name in _DISABLING if variables.get(name, "0") not in ("", "0"))
    return next(set_, "")
