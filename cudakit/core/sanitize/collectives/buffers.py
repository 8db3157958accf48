"""The bytes that one rank of a collective of NCCL accesses.

Source of the rules: NCCL User Guide, "Collective Communication Functions".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from cudakit.core.sanitize.clocks import READ, WRITE
from cudakit.trace.kinds import CollectiveFunction, NcclDatatype

# Bytes of one element. A type without a name in NCCL's events is ncclUint8.
ELEMENT_BYTES: Final = {
    NcclDatatype.UNKNOWN: 1,
    NcclDatatype.INT8: 1,
    NcclDatatype.UINT8: 1,
    NcclDatatype.INT32: 4,
    NcclDatatype.UINT32: 4,
    NcclDatatype.INT64: 8,
    NcclDatatype.UINT64: 8,
    NcclDatatype.FLOAT16: 2,
    NcclDatatype.FLOAT32: 4,
    NcclDatatype.FLOAT64: 8,
    NcclDatatype.BFLOAT16: 2,
    NcclDatatype.FLOAT8_E4M3: 1,
    NcclDatatype.FLOAT8_E5M2: 1,
}


class Membership(NamedTuple):
    """The membership of the process in a communicator."""

    rank: int = -1  # rank of the process; -1 if unknown
    rank_count: int = 0  # number of ranks; 0 if unknown
    hash: int = 0  # number that all ranks of the communicator share; 0 if unknown


class AccessedRange(NamedTuple):
    """Bytes from ``lo`` up to ``hi`` that a collective reads, writes or both."""

    lo: int
    hi: int
    mode: int


class Buffers(NamedTuple):
    """The buffers of a collective, as one rank passes them."""

    send: int  # address of the send buffer; 0 if there is none
    receive: int  # address of the receive buffer; 0 if there is none
    size_bytes: int  # size of one rank's part
    membership: Membership
    root: int = 0  # root rank; for a send or receive, the other rank

    def accessed_ranges(self, function: CollectiveFunction) -> Iterator[AccessedRange]:
        """Yield the bytes that the rank accesses. Bytes that it only contributes are not written."""
        return _RANGES[function](self)

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.membership.rank == self.root

    @property
    def is_in_place(self) -> bool:
        """Whether the two buffers are the same."""
        return self.send == self.receive

    @property
    def all_bytes(self) -> int:
        """The size of the parts of all ranks."""
        return self.size_bytes * self.membership.rank_count

    @property
    def part_offset(self) -> int:
        """The offset of this rank's part in the buffer with the parts of all ranks."""
        return self.size_bytes * self.membership.rank

    def sent(self, mode: int = READ) -> AccessedRange:
        """Return the access to one part in the send buffer."""
        return AccessedRange(self.send, self.send + self.size_bytes, mode)

    def received(self) -> AccessedRange:
        """Return the write of one part in the receive buffer."""
        return AccessedRange(self.receive, self.receive + self.size_bytes, WRITE)


def _all_reduce(buffers: Buffers) -> Iterator[AccessedRange]:
    if buffers.is_in_place:
        yield buffers.sent(READ | WRITE)
    else:
        yield buffers.sent()
        yield buffers.received()


def _all_gather(buffers: Buffers) -> Iterator[AccessedRange]:
    part, end = buffers.sent(), buffers.receive + buffers.all_bytes
    yield part
    if part.lo == buffers.receive + buffers.part_offset:
        yield AccessedRange(buffers.receive, part.lo, WRITE)
        yield AccessedRange(part.hi, end, WRITE)
    else:
        yield AccessedRange(buffers.receive, end, WRITE)


def _reduce_scatter(buffers: Buffers) -> Iterator[AccessedRange]:
    part, end = buffers.received(), buffers.send + buffers.all_bytes
    if part.lo == buffers.send + buffers.part_offset:
        yield AccessedRange(buffers.send, part.lo, READ)
        yield AccessedRange(part.lo, part.hi, READ | WRITE)
        yield AccessedRange(part.hi, end, READ)
    else:
        yield AccessedRange(buffers.send, end, READ)
        yield part


def _broadcast(buffers: Buffers) -> Iterator[AccessedRange]:
    if buffers.is_root:
        yield buffers.sent()
    if not (buffers.is_root and buffers.is_in_place):
        yield buffers.received()


def _reduce(buffers: Buffers) -> Iterator[AccessedRange]:
    if buffers.is_root:
        yield from _all_reduce(buffers)
    else:
        yield buffers.sent()


def _send(buffers: Buffers) -> Iterator[AccessedRange]:
    yield buffers.sent()


def _receive(buffers: Buffers) -> Iterator[AccessedRange]:
    yield buffers.received()


_RANGES: Final[Mapping[CollectiveFunction, Callable[[Buffers], Iterator[AccessedRange]]]] = {
    CollectiveFunction.ALL_REDUCE: _all_reduce,
    CollectiveFunction.ALL_GATHER: _all_gather,
    CollectiveFunction.REDUCE_SCATTER: _reduce_scatter,
    CollectiveFunction.BROADCAST: _broadcast,
    CollectiveFunction.REDUCE: _reduce,
    CollectiveFunction.SEND: _send,
    CollectiveFunction.RECEIVE: _receive,
}
