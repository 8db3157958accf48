"""Timestamp: the cycle counter and the time of each SM, written by one thread per SM.

The SM clock is the difference of the cycles of two timestamps divided by the difference of their times. NVML
is not needed.
"""

from __future__ import annotations

import numpy as np

from cudakit.arrays.launch import LoadedKernels, cuda_source
from cudakit.gpu.api import Kernels, Ptr, Stream
from cudakit.gpu.api.arrays import Launch, host_kernel

# Two words per SM: cycles and nanoseconds since arbitrary origins; 0 if no timestamp was written.
_WORDS_PER_STAMP = 2
STAMP_BYTES = 8 * _WORDS_PER_STAMP

SOURCE = cuda_source("timestamp.cu")


class Timestamp(LoadedKernels):
    """The timestamp kernel of one device."""

    def __init__(self, gpu: Kernels) -> None:
        super().__init__(gpu, SOURCE, ["cudakit_timestamp"])

    def stamp(self, stamps: Ptr, count: int, stream: Stream) -> None:
        """Write the timestamps of up to ``count`` SMs by SM index; an SM that runs no block writes none."""
        self.launch("cudakit_timestamp", (stamps, np.uint32(count)), stream, grid=count)


def clock_hz(first_stamps: memoryview, last_stamps: memoryview) -> float | None:
    """Return the clock of the first SM that has timestamps in both arrays, or None.

    All SMs of a device have the same clock.
    """
    for sm in range(0, len(first_stamps), _WORDS_PER_STAMP):
        (begin, begin_ns), (end, end_ns) = (
            first_stamps[sm : sm + _WORDS_PER_STAMP],
            last_stamps[sm : sm + _WORDS_PER_STAMP],
        )
        if begin_ns and end_ns > begin_ns and end > begin:
            return float((end - begin) * 1e9 / (end_ns - begin_ns))
    return None


@host_kernel("cudakit_timestamp")
def _timestamp(launch: Launch, stamps: Ptr, count: np.uint32) -> None:
    words = launch.write(stamps, np.uint64, _WORDS_PER_STAMP * min(int(count), launch.threads))
    words[::_WORDS_PER_STAMP] = launch.begin_cycles
    words[1::_WORDS_PER_STAMP] = launch.begin_ns
