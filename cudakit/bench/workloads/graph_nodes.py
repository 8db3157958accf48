"""The nodes of a graph, in a chain or in parallel branches. Each node writes bytes that show that it ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import TypeAlias

from cudakit.arrays.bandwidth import WIDTH_BYTES, Bandwidth
from cudakit.arrays.compare import Compare
from cudakit.bench.case import allocate, create_event, create_stream
from cudakit.gpu.api import LEGACY, ComputeDevice, Ptr, Stream

# Number of parallel branches of a fork-join; further nodes extend the branches.
BRANCH_COUNT = 8
# A node writes one of these bytes to all its memory, so that a fill node can write the same data as a kernel.
BYTES = (0xF0, 0x0F)
_WORDS_PER_NODE = WIDTH_BYTES // 4
_REPEATED_BYTE = 0x01010101  # A byte multiplied by this number is a word of four equal bytes.

# A function that enqueues one node, which fills WIDTH_BYTES at an address with a byte.
_EnqueueNode: TypeAlias = Callable[[Ptr, int, Stream], None]


class Nodes:
    """Nodes of one kind; each node writes 16 bytes that no other node writes."""

    def __init__(self, gpu: ComputeDevice, topology: str, kind: str, count: int) -> None:
        self.count = count
        self._gpu = gpu
        self._size_bytes = count * WIDTH_BYTES
        branch_count = min(BRANCH_COUNT, count) if topology == "fork-join" else 1
        with ExitStack() as cleanup:
            self._enqueue_node = _KINDS[kind](gpu, cleanup)
            self._compare = cleanup.enter_context(closing(Compare(gpu)))
            self._memory = allocate(gpu, cleanup, self._size_bytes)
            self._fork_event = create_event(gpu, cleanup)
            self._side_streams = [
                (create_stream(gpu, cleanup), create_event(gpu, cleanup))
                for _ in range(branch_count - 1)
            ]
            self._clear()
            self._cleanup = cleanup.pop_all()

    def enqueue(self, stream: Stream, byte: int = BYTES[0]) -> None:
        """Enqueue all nodes on a stream and, for a fork-join, on side streams that wait for this stream."""
        gpu = self._gpu
        branch_streams = [stream, *(side_stream for side_stream, _ in self._side_streams)]
        if self._side_streams:
            gpu.record(self._fork_event, stream)
        for side_stream, _ in self._side_streams:
            gpu.wait(side_stream, self._fork_event)
        for node_index in range(self.count):
            address = Ptr(self._memory + node_index * WIDTH_BYTES)
            self._enqueue_node(address, byte, branch_streams[node_index % len(branch_streams)])
        for side_stream, join_event in self._side_streams:
            gpu.record(join_event, side_stream)
            gpu.wait(stream, join_event)

    def count_missing(self, byte: int = BYTES[0]) -> int:
        """Return the number of nodes that did not write the byte since the previous call."""
        word = byte * _REPEATED_BYTE
        wrong_count = self._compare.count_not_equal(self._memory, word, self._size_bytes, LEGACY)
        self._clear()
        return -(-wrong_count // _WORDS_PER_NODE)

    def close(self) -> None:
        """Free the memory, and destroy streams, events and kernels."""
        self._cleanup.close()

    def _clear(self) -> None:
        self._gpu.fill(self._memory, 0, self._size_bytes, LEGACY)
        self._gpu.sync()


def _prepare_kernel_node(gpu: ComputeDevice, cleanup: ExitStack) -> _EnqueueNode:
    kernels = cleanup.enter_context(closing(Bandwidth(gpu)))
    return lambda address, byte, stream: kernels.write(
        address, byte * _REPEATED_BYTE, WIDTH_BYTES, stream
    )


def _prepare_fill_node(gpu: ComputeDevice, cleanup: ExitStack) -> _EnqueueNode:  # noqa: ARG001
    return lambda address, byte, stream: gpu.fill(address, byte, WIDTH_BYTES, stream)


def _prepare_copy_node(gpu: ComputeDevice, cleanup: ExitStack) -> _EnqueueNode:
    source_by_byte = {byte: allocate(gpu, cleanup, WIDTH_BYTES) for byte in BYTES}
    for byte, source in source_by_byte.items():
        gpu.fill(source, byte, WIDTH_BYTES, LEGACY)
    return lambda address, byte, stream: gpu.copy(
        address, source_by_byte[byte], WIDTH_BYTES, stream
    )


_KINDS: Mapping[str, Callable[[ComputeDevice, ExitStack], _EnqueueNode]] = {
    "kernel": _prepare_kernel_node,
    "fill": _prepare_fill_node,
    "copy": _prepare_copy_node,
}
