"""Kernels in a chain, or side by side between a fork and a join. Each leaves a trace that it ran."""

from __future__ import annotations

from contextlib import ExitStack, closing

from cudakit.gpu.api import LEGACY, Event, Gpu, Ptr, Stream
from cudakit.kernels.bandwidth import WIDTH_BYTES, Bandwidth
from cudakit.kernels.compare import Compare

# As many kernels side by side as there are here; of further ones, each follows another.
BRANCHES = 8
_WORD = 0xF0F0F0F0
_WORDS = WIDTH_BYTES // 4


class Nodes:
    """So many kernels, each of which writes 16 bytes of its own."""

    def __init__(self, gpu: Gpu, topology: str, count: int) -> None:
        self.count = count
        self._gpu = gpu
        self._size_bytes = count * WIDTH_BYTES
        branches = min(BRANCHES, count) if topology == "fork-join" else 1
        with ExitStack() as owned:
            self._kernels = owned.enter_context(closing(Bandwidth(gpu)))
            self._compare = owned.enter_context(closing(Compare(gpu)))
            self._memory = gpu.malloc(self._size_bytes)
            owned.callback(gpu.free, self._memory)
            self._fork = _event(gpu, owned)
            self._sides = [(_stream(gpu, owned), _event(gpu, owned)) for _ in range(branches - 1)]
            self._poison()
            self._owned = owned.pop_all()

    def enqueue(self, stream: Stream) -> None:
        """Enqueue all of them, on a stream and, for side by side, on others that wait for it."""
        gpu = self._gpu
        branches = [stream, *(side for side, _ in self._sides)]
        if self._sides:
            gpu.record(self._fork, stream)
        for side, _ in self._sides:
            gpu.wait(side, self._fork)
        for number in range(self.count):
            place = Ptr(self._memory + number * WIDTH_BYTES)
            self._kernels.write(place, _WORD, WIDTH_BYTES, branches[number % len(branches)])
        for side, join in self._sides:
            gpu.record(join, side)
            gpu.wait(stream, join)

    def take_missing(self) -> int:
        """Count those that did not run since this was last called."""
        wrong = self._compare.count_unlike(self._memory, _WORD, self._size_bytes, LEGACY)
        self._poison()
        return -(-wrong // _WORDS)

    def close(self) -> None:
        """Give everything back."""
        self._owned.close()

    def _poison(self) -> None:
        self._gpu.fill(self._memory, 0, self._size_bytes, LEGACY)
        self._gpu.sync()


def _stream(gpu: Gpu, owned: ExitStack) -> Stream:
    stream = gpu.stream(blocking=False)
    owned.callback(gpu.destroy_stream, stream)
    return stream


def _event(gpu: Gpu, owned: ExitStack) -> Event:
    event = gpu.event(timing=False)
    owned.callback(gpu.destroy_event, event)
    return event
