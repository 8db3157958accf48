"""Copies and fills."""

from __future__ import annotations

from typing import NamedTuple

from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.explain import Status, cuda_error
from cudakit.gpu.sim.context import driver_call
from cudakit.gpu.sim.peers import Peers
from cudakit.gpu.sim.space import Bytes, Region
from cudakit.gpu.sim.tasks import Engine, Job, Outcome
from cudakit.trace.events import Access, Copy, Fill
from cudakit.trace.kinds import Direction, HostMemory, Mode, Work
from cudakit.units import format_bytes

# Of pageable memory so much is staged at once, and the call returns (CUDA Runtime API, "API synchronization
# behavior", of cudaMemcpy).
_STAGED_BYTES = 64 << 10


class _Route(NamedTuple):
    """Between which memories a copy goes, what moves it, and how long that takes."""

    direction: Direction
    host: HostMemory
    engine: Engine | None
    cost_ns: int

    def is_staged(self, size_bytes: int) -> bool:
        """Say whether its source is read before the call returns, which waits for nothing."""
        to_device = self.direction is Direction.HOST_TO_DEVICE
        return to_device and self.host is HostMemory.PAGEABLE and size_bytes <= _STAGED_BYTES

    def waits(self, size_bytes: int) -> bool:
        """Say whether the call returns only when the copy is done."""
        return self.host is HostMemory.PAGEABLE and not self.is_staged(size_bytes)


class Transfers(Peers):
    """What is moved between the memories of one device, of its peers, and of its host."""

    @driver_call
    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        lane = self.lane(stream)
        seen = f"{format_bytes(size_bytes)} from {src:#x} to {dst:#x}"
        target, source = self._known(dst, size_bytes, seen), self._known(src, size_bytes, seen)
        if size_bytes == 0:
            return
        route = self._route(target[0], source[0], size_bytes)
        if route.host is HostMemory.PAGEABLE:
            lane = self._uncaptured_lane(stream)
        task = self.submit(lane, self._job(route, dst, src, size_bytes))
        if task is None:
            return
        direction, host = route.direction, route.host
        self.emit(Copy(lane.number, dst, src, size_bytes, direction=direction, host=host))
        if route.waits(size_bytes):
            self.wait_for((task,))

    @driver_call
    def fill(self, ptr: Ptr, value: int, size_bytes: int, stream: Stream) -> None:
        if not 0 <= value <= 255:
            raise cuda_error(Status.INVALID_VALUE, seen=f"{value} is no value of a byte")
        lane = self.lane(stream)
        regions = self._known(ptr, size_bytes, f"{format_bytes(size_bytes)} at {ptr:#x}")
        if any(region.host is HostMemory.PAGEABLE for region in regions):
            raise cuda_error(Status.INVALID_VALUE, seen=f"{ptr:#x} is pageable memory of the host")
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

    def _route(self, target: Region, source: Region, size_bytes: int) -> _Route:
        direction = _DIRECTIONS[bool(source.host), bool(target.host)]
        host, costs = max(target.host, source.host), self.costs
        if host:
            cost_ns = costs.over_link_ns if host is HostMemory.PINNED else costs.pageable_ns
            return _Route(direction, host, _ENGINES.get(direction), cost_ns(size_bytes))
        if target.peer == source.peer:
            return _Route(direction, host, None, costs.in_memory_ns(2 * size_bytes))
        to_peer = source.peer is None
        peer = target.peer if to_peer else source.peer
        nvlinks = 0 if peer is None else self.nvlinks(peer)
        engine = Engine.TO_PEER if to_peer else Engine.FROM_PEER
        return _Route(direction, host, engine, costs.to_peer_ns(size_bytes, nvlinks))

    def _job(self, route: _Route, dst: int, src: int, size_bytes: int) -> Job:
        staged = self._read(src, size_bytes).copy() if route.is_staged(size_bytes) else None

        def run() -> Outcome:
            content = self._read(src, size_bytes) if staged is None else staged
            self.copied(dst, size_bytes, "a copy writes").scatter(content)
            return Outcome(route.cost_ns)

        accesses = (_access(src, size_bytes, Mode.READ), _access(dst, size_bytes, Mode.WRITE))
        return Job(Work.COPY, run, engine=route.engine, accesses=accesses)

    def _read(self, ptr: int, size_bytes: int) -> Bytes:
        return self.copied(ptr, size_bytes, "a copy reads").gather()

    def _fill(self, ptr: int, value: int, size_bytes: int) -> Outcome:
        for piece in self.copied(ptr, size_bytes, "a fill writes").pieces:
            piece[:] = value
        return Outcome(self.costs.in_memory_ns(size_bytes))


# By whether the source, and the target, is memory of the host.
_DIRECTIONS = {
    (True, True): Direction.HOST_TO_HOST,
    (True, False): Direction.HOST_TO_DEVICE,
    (False, True): Direction.DEVICE_TO_HOST,
    (False, False): Direction.DEVICE_TO_DEVICE,
}
_ENGINES = {
    Direction.HOST_TO_DEVICE: Engine.HOST_TO_DEVICE,
    Direction.DEVICE_TO_HOST: Engine.DEVICE_TO_HOST,
}


def _access(ptr: int, size_bytes: int, mode: Mode) -> Access:
    return Access(ptr, ptr + size_bytes, mode)
