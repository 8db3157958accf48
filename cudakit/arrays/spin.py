"""Spin: kernels that wait for the host or for a duration, and an empty kernel."""

from __future__ import annotations

import numpy as np

from cudakit.arrays.launch import LoadedKernels, cuda_source
from cudakit.gpu.api import Kernels, Ptr, Stream
from cudakit.gpu.api.arrays import Launch, host_kernel

SOURCE = cuda_source("spin.cu")


class Spin(LoadedKernels):
    """The spin kernels of one device, with one thread each."""

    def __init__(self, gpu: Kernels) -> None:
        super().__init__(gpu, SOURCE, ("cudakit_spin_until", "cudakit_spin_for", "cudakit_empty"))

    def until(self, release_word: Ptr, timed_out: Ptr, limit_ns: int, stream: Stream) -> None:
        """Spin until the 32-bit word ``release_word`` in pinned memory is not 0.

        After ``limit_ns`` the kernel sets the word ``timed_out`` to 1 and ends, so that the device never
        hangs.
        """
        self.launch("cudakit_spin_until", (release_word, timed_out, np.uint64(limit_ns)), stream)

    def for_(self, duration_ns: int, stream: Stream) -> None:
        """Spin for a duration."""
        self.launch("cudakit_spin_for", (np.uint64(duration_ns),), stream)

    def empty(self, stream: Stream) -> None:
        """Launch an empty kernel."""
        self.launch("cudakit_empty", (), stream)


@host_kernel("cudakit_spin_until")
def _until(launch: Launch, release_word: Ptr, timed_out: Ptr, limit_ns: np.uint64) -> None:
    word = launch.read(release_word, np.uint32)

    def give_up() -> None:
        launch.write(timed_out, np.uint32)[:] = 1

    launch.poll(lambda: bool(word[0]), int(limit_ns), give_up)


@host_kernel("cudakit_spin_for")
def _for(launch: Launch, duration_ns: np.uint64) -> None:
    launch.busy(int(duration_ns))


@host_kernel("cudakit_empty")
def _empty(launch: Launch) -> None:
    pass
