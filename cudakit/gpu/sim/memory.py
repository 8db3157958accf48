"""Memory of the device and pinned memory of the host, and what is copied and filled there."""

from __future__ import annotations

from typing import Any

from cudakit.errors import CudaError
from cudakit.gpu.api import MemoryInfo, Ptr, Stream
from cudakit.gpu.explain import Status, cuda_error
from cudakit.gpu.sim.context import driver_call
from cudakit.gpu.sim.events import Events
from cudakit.gpu.sim.lanes import Lane
from cudakit.gpu.sim.space import Region, Space, Span, memory, round_up, span
from cudakit.gpu.sim.tasks import Engine, Job, Outcome
from cudakit.trace import events as facts
from cudakit.trace.kinds import Direction, HostMemory, How, Mode, Work
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
        self._pinned: dict[int, Region] = {}

    @driver_call
    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self._capacity_bytes - self._used_bytes, self._capacity_bytes)

    @driver_call
    def malloc(self, size_bytes: int, stream: Stream | None = None) -> Ptr:
        _check_size(size_bytes)
        lane = self._lane_of_memory(stream)
        self.charge(size_bytes)
        region = self._allocate(size_bytes, live=lane is None)
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
        region = _forget(self._allocated, ptr, f"no allocation of {self.name}")
        size_bytes = len(region.data)
        if lane is None:
            self.wait_for_all()
            self._end(region)
            self.emit(facts.Free(ptr, size_bytes))
        else:
            self.enqueue(lane, Job(Work.FREE, lambda: self._end(region)))
            self.emit(facts.Free(ptr, size_bytes, How.STREAM_ORDERED, lane.number))

    @driver_call
    def host_malloc(self, size_bytes: int) -> Ptr:
        _check_size(size_bytes)
        self.refuse_in_capture()
        region = self._allocate(size_bytes, pinned=True)
        self._pinned[region.begin] = region
        self.emit(facts.Alloc(region.begin, size_bytes, How.PINNED))
        return Ptr(region.begin)

    @driver_call
    def host_free(self, ptr: Ptr) -> None:
        self.refuse_in_capture()
        region = _forget(self._pinned, ptr, "no pinned memory of this process")
        self.wait_for_all()
        self.space.remove(region)
        self.emit(facts.Free(ptr, len(region.data), How.PINNED))

    @driver_call
    def host_view(self, ptr: Ptr, size_bytes: int) -> memoryview:
        region = self._pinned.get(ptr)
        if region is None or not 0 <= size_bytes <= len(region.data):
            raise cuda_error(
                Status.INVALID_VALUE,
                seen=f"{size_bytes} bytes at {ptr:#x} are not pinned memory of this process",
            )
        return memoryview(region.data[:size_bytes])

    @driver_call
    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        lane = self.lane(stream)
        seen = f"{format_bytes(size_bytes)} from {src:#x} to {dst:#x}"
        target, source = self._known(dst, size_bytes, seen), self._known(src, size_bytes, seen)
        if size_bytes == 0:
            return
        direction = _direction(target[0].pinned, source[0].pinned)
        job = Job(
            Work.COPY,
            lambda: self._copy(dst, src, size_bytes, direction),
            engine=_ENGINES.get(direction),
            accesses=(_access(src, size_bytes, Mode.READ), _access(dst, size_bytes, Mode.WRITE)),
        )
        if self.submit(lane, job):
            host = HostMemory.PINNED if target[0].pinned or source[0].pinned else HostMemory.NONE
            fact = facts.Copy(
                lane.number, dst, src, size_bytes, direction=direction, host=host
            )
            self.emit(fact)

    @driver_call
    def fill(self, ptr: Ptr, value: int, size_bytes: int, stream: Stream) -> None:
        if not 0 <= value <= 255:
            raise cuda_error(Status.INVALID_VALUE, seen=f"{value} is no value of a byte")
        lane = self.lane(stream)
        self._known(ptr, size_bytes, f"{format_bytes(size_bytes)} at {ptr:#x}")
        if size_bytes == 0:
            return
        job = Job(
            Work.FILL,
            lambda: self._fill(ptr, value, size_bytes),
            accesses=(_access(ptr, size_bytes, Mode.WRITE),),
        )
        if self.submit(lane, job):
            self.emit(facts.Fill(lane.number, ptr, size_bytes))

    def span(self, ptr: int, size_bytes: int, what: str) -> Span:
        """Return the bytes of a range for what runs now. Raises CUDA_ERROR_ILLEGAL_ADDRESS."""
        regions = self.space.within(ptr, size_bytes)
        if regions is None or not all(region.live for region in regions):
            raise cuda_error(
                Status.ILLEGAL_ADDRESS,
                seen=f"{what}: {size_bytes} bytes at {ptr:#x} are not allocated, or not in its order",
            )
        return span(regions, ptr, size_bytes)

    def charge(self, size_bytes: int) -> None:
        """Take memory of the device. Raises CUDA_ERROR_OUT_OF_MEMORY."""
        if self._used_bytes + _rounded(size_bytes) > self._capacity_bytes:
            self.wait_for_all()  # what is freed in the order of a stream may be enough
        if self._used_bytes + _rounded(size_bytes) > self._capacity_bytes:
            raise cuda_error(Status.OUT_OF_MEMORY, seen=self._shortage(size_bytes))
        self._used_bytes += _rounded(size_bytes)

    def credit(self, size_bytes: int) -> None:
        """Give memory of the device back."""
        self._used_bytes -= _rounded(size_bytes)

    def close(self) -> None:
        super().close()
        self._allocated.clear()
        self._pinned.clear()

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

    def _allocate(self, size_bytes: int, *, live: bool = True, pinned: bool = False) -> Region:
        begin = self.space.take(size_bytes, _ALIGNMENT_BYTES)
        region = Region(begin, memory(size_bytes), live, pinned)
        self.space.add(region)
        return region

    def _begin(self, region: Region) -> Outcome:
        region.live = True
        return Outcome()

    def _end(self, region: Region) -> Outcome:
        region.live = False
        self.space.remove(region)
        self.credit(len(region.data))
        return Outcome()

    def _known(self, ptr: int, size_bytes: int, seen: str) -> list[Region]:
        """Look up what a call is given, whether its turn has come or not."""
        regions = self.space.within(ptr, max(size_bytes, 1))
        if size_bytes < 0 or regions is None:
            raise cuda_error(Status.INVALID_VALUE, seen=f"{seen} is not all allocated memory")
        return regions

    def _copy(self, dst: int, src: int, size_bytes: int, direction: Direction) -> Outcome:
        content = self.span(src, size_bytes, "a copy reads").gather()
        self.span(dst, size_bytes, "a copy writes").scatter(content)
        within = direction is Direction.DEVICE_TO_DEVICE
        cost_ns = self.costs.in_memory_ns if within else self.costs.over_link_ns
        return Outcome(cost_ns(2 * size_bytes if within else size_bytes))

    def _fill(self, ptr: int, value: int, size_bytes: int) -> Outcome:
        for piece in self.span(ptr, size_bytes, "a fill writes").pieces:
            piece[:] = value
        return Outcome(self.costs.in_memory_ns(size_bytes))

    def _shortage(self, size_bytes: int) -> str:
        free, total = (
            format_bytes(amount)
            for amount in (self._capacity_bytes - self._used_bytes, self._capacity_bytes)
        )
        return f"{format_bytes(size_bytes)} asked, {free} of {total} free on {self.name}"


_ENGINES = {
    Direction.HOST_TO_DEVICE: Engine.HOST_TO_DEVICE,
    Direction.DEVICE_TO_HOST: Engine.DEVICE_TO_HOST,
}


def _direction(target_pinned: bool, source_pinned: bool) -> Direction:
    if source_pinned:
        return Direction.HOST_TO_HOST if target_pinned else Direction.HOST_TO_DEVICE
    return Direction.DEVICE_TO_HOST if target_pinned else Direction.DEVICE_TO_DEVICE


def _access(ptr: int, size_bytes: int, mode: Mode) -> facts.Access:
    return facts.Access(ptr, ptr + size_bytes, mode)


def _rounded(size_bytes: int) -> int:
    return round_up(size_bytes, _ALIGNMENT_BYTES)


def _check_size(size_bytes: int) -> None:
    if size_bytes <= 0:
        raise cuda_error(Status.INVALID_VALUE, seen=f"{size_bytes} bytes asked")


def _forget(regions: dict[int, Region], ptr: int, what: str) -> Region:
    try:
        return regions.pop(ptr)
    except KeyError:
        raise _no_such(ptr, what) from None


def _no_such(ptr: int, what: str) -> CudaError:
    return cuda_error(
        Status.INVALID_VALUE, seen=f"{what} begins at {ptr:#x}; it may have been freed before"
    )
