"""The memory that is there: what an address belongs to."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from cudakit.core.sanitize.races import Allocation


class Allocations:
    """Allocations of one layer, which share no bytes."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._allocations: list[Allocation] = []

    def add(self, allocation: Allocation) -> None:
        """Add an allocation; it replaces what was in its bytes."""
        begin = self._first_in(allocation.address)
        end = bisect_left(self._addresses, allocation.address + allocation.size_bytes, lo=begin)
        self._addresses[begin:end] = [allocation.address]
        self._allocations[begin:end] = [allocation]

    def remove(self, address: int) -> Allocation | None:
        """Forget and return the allocation that begins at an address."""
        index = bisect_left(self._addresses, address)
        if index == len(self._addresses) or self._addresses[index] != address:
            return None
        del self._addresses[index]
        return self._allocations.pop(index)

    def at(self, address: int) -> Allocation | None:
        """Return the allocation that an address is in."""
        index = bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        found = self._allocations[index]
        return found if address < found.address + found.size_bytes else None

    def _first_in(self, address: int) -> int:
        """Return the place of the first allocation that ends behind an address."""
        index = bisect_right(self._addresses, address)
        return index - 1 if self.at(address) is not None else index
