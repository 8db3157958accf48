"""Virtual memory: addresses are reserved, physical memory is created and mapped into them.

CUDA Driver API, Virtual Memory Management.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cudakit.errors import CudaError
from cudakit.gpu.api import Backing, Ptr
from cudakit.gpu.explain import Status, cuda_error
from cudakit.gpu.sim.context import driver_call
from cudakit.gpu.sim.ids import Ids
from cudakit.gpu.sim.space import Bytes, Region, memory
from cudakit.gpu.sim.transfers import Transfers
from cudakit.trace.events import Alloc, Free
from cudakit.trace.kinds import How

# What cuMemGetAllocationGranularity says on every device that we know of.
_GRANULARITY_BYTES = 2 << 20


@dataclass(slots=True, eq=False)
class _Physical:
    """Physical memory, which lives until it is released and mapped nowhere."""

    data: Bytes
    mappings: int = 0
    released: bool = False


class VirtualMemory(Transfers):
    """Address ranges of one device and the physical memory behind them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backings: Ids[tuple[int, _Physical]] = Ids("backing")
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, tuple[Region, _Physical]] = {}

    @driver_call
    def granularity(self) -> int:
        return _GRANULARITY_BYTES

    @driver_call
    def reserve(self, size_bytes: int) -> Ptr:
        _check_size(size_bytes)
        begin = self.space.take(size_bytes, _GRANULARITY_BYTES)
        self._reserved[begin] = size_bytes
        return Ptr(begin)

    @driver_call
    def unreserve(self, ptr: Ptr, size_bytes: int) -> None:
        if self._reserved.get(ptr) != size_bytes or not self.space.is_empty(ptr, size_bytes):
            raise _refused(ptr, size_bytes, "not a whole reservation, or memory is mapped there")
        del self._reserved[ptr]

    @driver_call
    def create(self, size_bytes: int) -> Backing:
        _check_size(size_bytes)
        self.charge(size_bytes)
        number, _ = self._backings.add(lambda number: (number, _Physical(memory(size_bytes))))
        return Backing(number)

    @driver_call
    def release(self, backing: Backing) -> None:
        _, physical = self._backings.remove(backing)
        physical.released = True
        self._give_back(physical)

    @driver_call
    def map(self, ptr: Ptr, backing: Backing, size_bytes: int) -> None:
        _, physical = self._backings[backing]
        _check_size(size_bytes)
        if size_bytes > len(physical.data) or not self._is_reserved(ptr, size_bytes):
            raise _refused(ptr, size_bytes, "more than the backing has, or not reserved")
        if ptr % _GRANULARITY_BYTES or not self.space.is_empty(ptr, size_bytes):
            raise _refused(ptr, size_bytes, "not aligned, or memory is mapped there already")
        region = Region(ptr, physical.data[:size_bytes])
        self.space.add(region)
        self._mapped[ptr] = (region, physical)
        physical.mappings += 1
        self.emit(Alloc(ptr, size_bytes, How.VIRTUAL))

    @driver_call
    def unmap(self, ptr: Ptr, size_bytes: int) -> None:
        mapped = list(self._mappings(ptr, size_bytes))
        for region, physical in mapped:
            self.space.remove(region)
            del self._mapped[region.begin]
            physical.mappings -= 1
            self._give_back(physical)
            self.emit(Free(region.begin, len(region.data), How.VIRTUAL))

    def _is_reserved(self, ptr: int, size_bytes: int) -> bool:
        return any(
            begin <= ptr and ptr + size_bytes <= begin + size
            for begin, size in self._reserved.items()
        )

    def _mappings(self, ptr: int, size_bytes: int) -> Iterator[tuple[Region, _Physical]]:
        """Find the mappings that make up a range, each of them whole."""
        place, end = ptr, ptr + size_bytes
        while place < end:
            if place not in self._mapped or self._mapped[place][0].end > end:
                raise _refused(ptr, size_bytes, "not mapped, or a part of what was mapped at once")
            yield self._mapped[place]
            place = self._mapped[place][0].end

    def _give_back(self, physical: _Physical) -> None:
        if physical.released and not physical.mappings:
            self.credit(len(physical.data))


def _check_size(size_bytes: int) -> None:
    if size_bytes <= 0 or size_bytes % _GRANULARITY_BYTES:
        raise cuda_error(
            Status.INVALID_VALUE,
            seen=f"{size_bytes} bytes, of which {_GRANULARITY_BYTES} must be a divisor",
        )


def _refused(ptr: int, size_bytes: int, why: str) -> CudaError:
    return cuda_error(Status.INVALID_VALUE, seen=f"{size_bytes} bytes at {ptr:#x}: {why}")
