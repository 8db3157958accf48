"""The bytes that one rank of a collective of NCCL accesses.

Source of the rules: NCCL User Guide, "Collective Communication Functions".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from cudakit.sanitize.clocks import READ, WRITE
from cudakit.trace.kinds import CollectiveFunction


class Membership(NamedTuple):
    """The membership of the process in a communicator."""

    rank: int = -1  # rank of the process; -1 if unknown
    rank_count: int = 0  # number of ranks; 0 if unknown
    communicator_hash: int = 0  # hash of the communicator, the same on all ranks; 0 if unknown


class AccessedRange(NamedTuple):
    """Bytes from ``lo`` up to ``hi`` that a collective reads or writes, or both."""

    lo: int
    hi: int
    mode: int  # READ, WRITE or both


class Buffers(NamedTuple):
    """The buffers of a collective, as one rank passes them."""

    send_address: int  # address of the send buffer; 0 if there is none
    receive_address: int  # address of the receive buffer; 0 if there is none
    size_bytes: int  # size in bytes of one rank's part of the data
    membership: Membership
    root: int = 0  # root rank; for a send or receive, the other rank

    def accessed_ranges(self, function: CollectiveFunction) -> Iterator[AccessedRange]:
        """Yield the bytes that the rank accesses. Bytes that the rank only sends are only read."""
        return _RANGE_FUNCTIONS[function](self)

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.membership.rank == self.root

    @property
    def is_in_place(self) -> bool:
        """Whether the send buffer is also the receive buffer."""
        return self.send_address == self.receive_address

    @property
    def all_bytes(self) -> int:
        """The size in bytes of the parts of all ranks together."""
        return self.size_bytes * self.membership.rank_count

    @property
    def part_offset(self) -> int:
        """The offset of this rank's part in the buffer with the parts of all ranks."""
        return self.size_bytes * self.membership.rank

    def send_access(self, mode: int = READ) -> AccessedRange:
        """Return the access to the rank's part in the send buffer."""
        return AccessedRange(self.send_address, self.send_address + self.size_bytes, mode)

    def receive_access(self) -> AccessedRange:
        """Return the write of the rank's part in the receive buffer."""
        return AccessedRange(self.receive_address, self.receive_address + self.size_bytes, WRITE)


def _all_reduce_ranges(buffers: Buffers) -> Iterator[AccessedRange]:
    if buffers.is_in_place:
        yield buffers.send_access(READ | WRITE)
    else:
        yield buffers.send_access()
        yield buffers.receive_access()


def _all_gather_ranges(buffers: Buffers) -> Iterator[AccessedRange]:
    sent_part, receive_end = buffers.send_access(), buffers.receive_address + buffers.all_bytes
    yield sent_part
    if sent_part.lo == buffers.receive_address + buffers.part_offset:
        yield AccessedRange(buffers.receive_address, sent_part.lo, WRITE)
        yield AccessedRange(sent_part.hi, receive_end, WRITE)
    else:
        yield AccessedRange(buffers.receive_address, receive_end, WRITE)


def _reduce_scatter_ranges(buffers: Buffers) -> Iterator[AccessedRange]:
    received_part, send_end = buffers.receive_access(), buffers.send_address + buffers.all_bytes
    if received_part.lo == buffers.send_address + buffers.part_offset:
        yield AccessedRange(buffers.send_address, received_part.lo, READ)
        yield AccessedRange(received_part.lo, received_part.hi, READ | WRITE)
        yield AccessedRange(received_part.hi, send_end, READ)
    else:
        yield AccessedRange(buffers.send_address, send_end, READ)
        yield received_part


def _broadcast_ranges(buffers: Buffers) -> Iterator[AccessedRange]:
    if buffers.is_root:
        yield buffers.send_access()
    if not (buffers.is_root and buffers.is_in_place):
        yield buffers.receive_access()


def _reduce_ranges(buffers: Buffers) -> Iterator[AccessedRange]:
    if buffers.is_root:
        yield from _all_reduce_ranges(buffers)
    else:
        yield buffers.send_access()


def _send_ranges(buffers: Buffers) -> Iterator[AccessedRange]:
    yield buffers.send_access()


def _receive_ranges(buffers: Buffers) -> Iterator[AccessedRange]:
    yield buffers.receive_access()


_RANGE_FUNCTIONS: Final[
    Mapping[CollectiveFunction, Callable[[Buffers], Iterator[AccessedRange]]]
] = {
    CollectiveFunction.ALL_REDUCE: _all_reduce_ranges,
    CollectiveFunction.ALL_GATHER: _all_gather_ranges,
    CollectiveFunction.REDUCE_SCATTER: _reduce_scatter_ranges,
    CollectiveFunction.BROADCAST: _broadcast_ranges,
    CollectiveFunction.REDUCE: _reduce_ranges,
    CollectiveFunction.SEND: _send_ranges,
    CollectiveFunction.RECEIVE: _receive_ranges,
}
