"""Collective operations between GPUs, and the protocols of a library that performs them.

The operations, and the meaning of their element counts, are those of NCCL (NVIDIA NCCL user guide,
"Collective Communication Functions" and "Point To Point Communication Functions").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from cudakit.gpu.api.arrays import Element
from cudakit.gpu.api.values import Ptr, Stream

# send-receive: every rank sends to the next rank and receives from the previous one.
OPERATIONS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "broadcast",
    "reduce",
    "all-to-all",
    "send-receive",
)
# Operations whose result is a sum over the ranks.
REDUCTIONS = ("all-reduce", "reduce-scatter", "reduce")
# The rank that sends a broadcast and receives a reduce.
ROOT = 0

CollectiveLibraryName: TypeAlias = Literal["nccl", "torch"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective operation on buffers of one element type; reductions compute sums.

    ``count`` is the number of elements of one chunk: for all-gather, reduce-scatter and all-to-all, a buffer
    with data of all ranks has one chunk per rank. Buffers of the other operations have one chunk.
    """

    operation: str
    element: Element
    count: int

    @property
    def chunk_bytes(self) -> int:
        """Size of one chunk, the part of a buffer that belongs to one rank, in bytes."""
        return self.count * self.element.size_bytes

    def send_chunks(self, rank_count: int) -> int:
        """Return the number of chunks of a send buffer."""
        return rank_count if self.operation in ("reduce-scatter", "all-to-all") else 1

    def receive_chunks(self, rank_count: int) -> int:
        """Return the number of chunks of a receive buffer."""
        return rank_count if self.operation in ("all-gather", "all-to-all") else 1


def bus_factor(operation: str, rank_count: int) -> float:
    """Return the bus bandwidth of an operation divided by its algorithm bandwidth.

    The algorithm bandwidth is size / time. The size is that of the largest buffer: all-gather,
    reduce-scatter and all-to-all count the data of all ranks. The bus bandwidth is comparable with the
    bandwidth of a link in one direction (NVIDIA nccl-tests, doc/PERFORMANCE.md; the factor 1 of
    send-receive is in src/sendrecv.cu).
    """
    match operation:
        case "all-reduce":
            return 2 * (rank_count - 1) / rank_count
        case "all-gather" | "reduce-scatter" | "all-to-all":
            return (rank_count - 1) / rank_count
    return 1.0


class Communicator(Protocol):
    """One rank of a group of ranks that perform collective operations together."""

    def enqueue(
        self, collective: Collective, send_buffer: Ptr, receive_buffer: Ptr, stream: Stream
    ) -> None:
        """Enqueue one operation. All ranks must enqueue the same operations in the same order.

        Raises Unsupported for an operation that the library lacks, CollectiveError if the library fails.
        """

    def synchronize(self, stream: Stream) -> None:
        """Wait for all work of a stream.

        Raises CollectiveError after ``abort``, or if another rank failed.
        """

    def abort(self) -> None:
        """Make the operations of this rank end without a result. Any thread may call this method."""

    def close(self) -> None:
        """Release the communicator. All ranks call this method at the same time."""


class CollectiveLibrary(Protocol):
    """A library of collective operations."""

    @property
    def version(self) -> str:
        """Version of the library: "2.28.9"."""

    @property
    def path(self) -> str:
        """Path of the shared library, or a description of the library."""

    def unique_id(self, host: str) -> bytes:
        """Return the id of a new group of ranks. One rank calls this method, and passes the id to all.

        The other ranks can reach the calling process by the name or address ``host``.
        """

    def connect(self, unique_id: bytes, rank: int, rank_count: int) -> Communicator:
        """Join a group; blocks until all ``rank_count`` have joined. Raises CollectiveError on failure."""
