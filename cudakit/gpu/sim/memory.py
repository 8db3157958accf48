"""Memory of the device."""

from __future__ import annotations

from typing import Any

from cudakit.errors import CudaError
from cudakit.gpu.api import MemoryInfo, Ptr, Stream
from cudakit.gpu.explain import Status, cuda_error
from cudakit.gpu.sim.context import driver_call
from cudakit.gpu.sim.events import Events
from cudakit.gpu.sim.lanes import Lane
from cudakit.gpu.sim.space import Region, Space, Span, memory, round_up, span
from cudakit.gpu.sim.tasks import Job, Outcome
from cudakit.trace import events as facts
from cudakit.trace.kinds import HostMemory, How, Work
from cudakit.units import format_bytes

# What sizes are rounded up to, and addresses are multiples of.
_ALIGNMENT_BYTES = 512


class Memory(Events):
    """Allocations of one device, at once or in the order of a stream."""

    def __init__(self, *args: Any, capacity_bytes: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        known = self.limit("usable_memory_bytes", 1 << 30)
        self._capacity_bytes = known if capacity_bytes is None else capacity_bytes
        self._used_bytes = 0
        self.space = Space()
        self._allocated: dict[int, Region] = {}

    @driver_call
    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self._capacity_bytes - self._used_bytes, self._capacity_bytes)

    @driver_call
    def malloc(self, size_bytes: int, stream: Stream | None = None) -> Ptr:
        check_size(size_bytes)
        lane = self._lane_of_memory(stream)
        self.charge(size_bytes)
        region = self.allocate(size_bytes, live=lane is None)
        self._allocated[region.begin] = region
        if lane is None:
            self.emit(facts.Alloc(region.begin, size_bytes))
        else:
            self.enqueue(lane, Job(Work.ALLOC, lambda: self._begin(region)))
            how = How.STREAM_ORDERED
            self.emit(facts.Alloc(region.begin, size_bytes, how, lane.number))
        return Ptr(region.begin)

    @driver_call
    def free(self, ptr: Ptr, stream: Stream | None = None) -> None:
        lane = self._lane_of_memory(stream)
        region = forget(self._allocated, ptr, f"no allocation of {self.name}")
        size_bytes = len(region.data)
        if lane is None:
            self.wait_for_all()
            self._end(region)
            self.emit(facts.Free(ptr, size_bytes))
        else:
            self.enqueue(lane, Job(Work.FREE, lambda: self._end(region)))
            self.emit(facts.Free(ptr, size_bytes, How.STREAM_ORDERED, lane.number))

    def span(self, ptr: int, size_bytes: int, what: str) -> Span:
        """Return the bytes of a range for a kernel that runs now. Raises CUDA_ERROR_ILLEGAL_ADDRESS."""
        regions = self._live(ptr, size_bytes, what)
        if not all(map(self._is_reached, regions)):
            whose = "pageable memory of the host, or of a device that is out of reach"
            raise cuda_error(
                Status.ILLEGAL_ADDRESS, seen=f"{what}: {size_bytes} bytes at {ptr:#x} are {whose}"
            )
        return span(regions, ptr, size_bytes)

    def copied(self, ptr: int, size_bytes: int, what: str) -> Span:
        """Return the bytes of a range for a copy or fill that runs now. Raises as ``span``."""
        return span(self._live(ptr, size_bytes, what), ptr, size_bytes)

    def charge(self, size_bytes: int) -> None:
        """Take memory of the device. Raises CUDA_ERROR_OUT_OF_MEMORY."""
        if self._used_bytes + rounded(size_bytes) > self._capacity_bytes:
            self.wait_for_all()  # what is freed in the order of a stream may be enough
        if self._used_bytes + rounded(size_bytes) > self._capacity_bytes:
            raise cuda_error(Status.OUT_OF_MEMORY, seen=self._shortage(size_bytes))
        self._used_bytes += rounded(size_bytes)

    def credit(self, size_bytes: int) -> None:
        """Give memory of the device back."""
        self._used_bytes -= rounded(size_bytes)

    def close(self) -> None:
        super().close()
        self._allocated.clear()

    def _lane_of_memory(self, stream: Stream | None) -> Lane | None:
        if stream is None:
            self.refuse_in_capture()
            return None
        lane = self.lane(stream)
        if lane.capture:
            raise cuda_error(
                Status.NOT_SUPPORTED, seen="a simulated graph does not allocate or free memory"
            )
        return lane

    def allocate(
        self,
        size_bytes: int,
        *,
        live: bool = True,
        host: HostMemory = HostMemory.NONE,
        peer: int | None = None,
    ) -> Region:
        """Make memory of any kind, and give it addresses."""
        data = memory(size_bytes)
        begin = self.space.take(size_bytes, _ALIGNMENT_BYTES)
        region = Region(begin, data, live, host, peer)
        self.space.add(region)
        return region

    def _live(self, ptr: int, size_bytes: int, what: str) -> list[Region]:
        regions = self.space.within(ptr, size_bytes)
        if regions is None or not all(region.live for region in regions):
            raise cuda_error(
                Status.ILLEGAL_ADDRESS,
                seen=f"{what}: {size_bytes} bytes at {ptr:#x} are not allocated, or not in its order",
            )
        return regions

    def _is_reached(self, region: Region) -> bool:
        """Say whether kernels can use memory of whatever kind."""
        if region.peer is not None:
            return (self.ordinal, region.peer) in self._view.peer_access
        pageable = region.host is HostMemory.PAGEABLE
        return not pageable or self._facts.fields.get("pageable_memory_access") is True

    def _begin(self, region: Region) -> Outcome:
        region.live = True
        return Outcome()

    def _end(self, region: Region) -> Outcome:
        region.live = False
        self.space.remove(region)
        self.credit(len(region.data))
        return Outcome()

    def _shortage(self, size_bytes: int) -> str:
        free, total = (
            format_bytes(amount)
            for amount in (self._capacity_bytes - self._used_bytes, self._capacity_bytes)
        )
        return f"{format_bytes(size_bytes)} asked, {free} of {total} free on {self.name}"


def rounded(size_bytes: int) -> int:
    """Say how much memory an allocation takes."""
    return round_up(size_bytes, _ALIGNMENT_BYTES)


def check_size(size_bytes: int) -> None:
    """Refuse an allocation of nothing."""
    if size_bytes <= 0:
        raise cuda_error(Status.INVALID_VALUE, seen=f"{size_bytes} bytes asked")


def forget(regions: dict[int, Region], ptr: int, what: str) -> Region:
    """Take an allocation out. Raises CUDA_ERROR_INVALID_VALUE where none begins there."""
    try:
        return regions.pop(ptr)
    except KeyError:
        raise _no_such(ptr, what) from None


def _no_such(ptr: int, what: str) -> CudaError:
    return cuda_error(
        Status.INVALID_VALUE, seen=f"{what} begins at {ptr:#x}; it may have been freed before"
    )
