"""The nodes of a graph, in a chain or in parallel branches. Each writes bytes that show that it ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import TypeAlias

from cudakit.core.bench.workload import allocate, create_event, create_stream
from cudakit.gpu.api import LEGACY, ComputeDevice, Ptr, Stream
from cudakit.kernels.bandwidth import WIDTH_BYTES, Bandwidth
from cudakit.kernels.compare import Compare

# Number of parallel branches of a fork-join; further nodes extend the branches.
BRANCHES = 8
# A node writes one of two bytes, which a fill node can write as well.
BYTES = (0xF0, 0x0F)
_WORDS = WIDTH_BYTES // 4
_REPEAT = 0x01010101  # multiplies a byte to a word of four equal bytes

# Enqueues one node, which writes a byte to WIDTH_BYTES at an address.
_Enqueue: TypeAlias = Callable[[Ptr, int, Stream], None]


class Nodes:
    """Nodes of one kind; each writes its own 16 bytes."""

    def __init__(self, gpu: ComputeDevice, topology: str, kind: str, count: int) -> None:
        self.count = count
        self._gpu = gpu
        self._size_bytes = count * WIDTH_BYTES
        branches = min(BRANCHES, count) if topology == "fork-join" else 1
        with ExitStack() as cleanup:
            self._enqueue_one = _KINDS[kind](gpu, cleanup)
            self._compare = cleanup.enter_context(closing(Compare(gpu)))
            self._memory = allocate(gpu, cleanup, self._size_bytes)
            self._fork = create_event(gpu, cleanup)
            self._sides = [
                (create_stream(gpu, cleanup), create_event(gpu, cleanup))
                for _ in range(branches - 1)
            ]
            self._poison()
            self._cleanup = cleanup.pop_all()

    def enqueue(self, stream: Stream, byte: int = BYTES[0]) -> None:
        """Enqueue all nodes on a stream and, for a fork-join, on side streams that wait for it."""
        gpu = self._gpu
        branches = [stream, *(side for side, _ in self._sides)]
        if self._sides:
            gpu.record(self._fork, stream)
        for side, _ in self._sides:
            gpu.wait(side, self._fork)
        for number in range(self.count):
            address = Ptr(self._memory + number * WIDTH_BYTES)
            self._enqueue_one(address, byte, branches[number % len(branches)])
        for side, join in self._sides:
            gpu.record(join, side)
            gpu.wait(stream, join)

    def count_missing(self, byte: int = BYTES[0]) -> int:
        """Return the number of nodes that did not write the byte since the previous call."""
        word = byte * _REPEAT
        wrong = self._compare.count_not_equal(self._memory, word, self._size_bytes, LEGACY)
        self._poison()
        return -(-wrong // _WORDS)

    def close(self) -> None:
        """Release everything."""
        self._cleanup.close()

    def _poison(self) -> None:
        self._gpu.fill(self._memory, 0, self._size_bytes, LEGACY)
        self._gpu.sync()


def _kernel(gpu: ComputeDevice, cleanup: ExitStack) -> _Enqueue:
    kernels = cleanup.enter_context(closing(Bandwidth(gpu)))
    return lambda address, byte, stream: kernels.write(address, byte * _REPEAT, WIDTH_BYTES, stream)


def _fill(gpu: ComputeDevice, cleanup: ExitStack) -> _Enqueue:  # noqa: ARG001
    return lambda address, byte, stream: gpu.fill(address, byte, WIDTH_BYTES, stream)


def _copy(gpu: ComputeDevice, cleanup: ExitStack) -> _Enqueue:
    sources = {byte: allocate(gpu, cleanup, WIDTH_BYTES) for byte in BYTES}
    for byte, source in sources.items():
        gpu.fill(source, byte, WIDTH_BYTES, LEGACY)
    return lambda address, byte, stream: gpu.copy(address, sources[byte], WIDTH_BYTES, stream)


_KINDS: Mapping[str, Callable[[ComputeDevice, ExitStack], _Enqueue]] = {
    "kernel": _kernel,
    "fill": _fill,
    "copy": _copy,
}
