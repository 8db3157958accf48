"""Copies and fills."""

from __future__ import annotations

from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.explain import Status, cuda_error
from cudakit.gpu.sim.context import driver_call
from cudakit.gpu.sim.memory import Memory
from cudakit.gpu.sim.space import Region
from cudakit.gpu.sim.tasks import Engine, Job, Outcome
from cudakit.trace.events import Access, Copy, Fill
from cudakit.trace.kinds import Direction, HostMemory, Mode, Work
from cudakit.units import format_bytes


class Transfers(Memory):
    """What is moved between the memories of one device and its host."""

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
            fact = Copy(lane.number, dst, src, size_bytes, direction=direction, host=host)
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
            self.emit(Fill(lane.number, ptr, size_bytes))

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


_ENGINES = {
    Direction.HOST_TO_DEVICE: Engine.HOST_TO_DEVICE,
    Direction.DEVICE_TO_HOST: Engine.DEVICE_TO_HOST,
}


def _direction(target_pinned: bool, source_pinned: bool) -> Direction:
    if source_pinned:
        return Direction.HOST_TO_HOST if target_pinned else Direction.HOST_TO_DEVICE
    return Direction.DEVICE_TO_HOST if target_pinned else Direction.DEVICE_TO_DEVICE


def _access(ptr: int, size_bytes: int, mode: Mode) -> Access:
    return Access(ptr, ptr + size_bytes, mode)
