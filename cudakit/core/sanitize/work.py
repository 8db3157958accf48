"""Launches, copies and fills: what they touch, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from cudakit.core.sanitize.allocations import Allocations
from cudakit.core.sanitize.calls import EXACT, READ, WRITE, Call, Touch
from cudakit.core.sanitize.columns import AccessRow
from cudakit.core.sanitize.races import Coverage
from cudakit.core.sanitize.shadow import Shadow
from cudakit.core.sanitize.streams import Order, Stream
from cudakit.core.sanitize.transfers import fill_is_waited_for, host_side


class Work:
    """The work of streams outside of graphs."""

    def __init__(
        self,
        order: Order,
        shadow: Shadow,
        memory: Allocations,
        coverage: Coverage,
        *,
        strict: bool,
    ) -> None:
        self._order = order
        self._shadow = shadow
        self._memory = memory
        self._coverage = coverage
        self._strict = strict
        self._call: Call | None = None
        self._stream: Stream | None = None

    def launch(
        self, call: Call, rows: Iterable[AccessRow]
    ) -> Callable[[Iterable[AccessRow]], None]:
        """Take a launch and its accesses; return what takes more of them, if there are."""
        self._call = call
        self._stream = stream = self._order.enqueue(call)
        if stream is None:  # it is captured
            deque(rows, maxlen=0)
        else:
            self._shadow.add_all(rows, call, stream)
        return self.accesses

    def accesses(self, rows: Iterable[AccessRow]) -> None:
        """Take more accesses of the last launch."""
        if self._call is None or self._stream is None:
            deque(rows, maxlen=0)
        else:
            self._shadow.add_all(rows, self._call, self._stream)

    def copy(
        self,
        call: Call,
        destination: int,
        source: int,
        size_bytes: int,
        rows: int,
        destination_pitch_bytes: int,
        source_pitch_bytes: int,
        direction: int,
        host: int,
        asynchronous: bool,
    ) -> None:
        self._coverage.copies += 1
        if self._order.stream(call).graph:
            return
        side = host_side(direction, host, asynchronous=asynchronous, strict=self._strict)
        if side.waits_before:
            self._order.host_waits_for(self._order.stream(call), call)
        read, written = (
            (source, size_bytes, rows, source_pitch_bytes, READ),
            (destination, size_bytes, rows, destination_pitch_bytes, WRITE),
        )
        self._touch(call, *read, by_host=side.reads_source)
        self._touch(call, *written, by_host=side.writes_destination)
        if side.waits_after:
            self._order.host_waits_for(self._order.stream(call), call)

    def fill(
        self,
        call: Call,
        address: int,
        size_bytes: int,
        rows: int,
        pitch_bytes: int,
        asynchronous: bool,
    ) -> None:
        self._coverage.fills += 1
        self._touch(call, address, size_bytes, rows, pitch_bytes, WRITE, by_host=False)
        owner = self._memory.at(address)
        if fill_is_waited_for(owner.how if owner else None, asynchronous=asynchronous):
            self._order.host_waits_for(self._order.stream(call), call)

    def _touch(
        self, call: Call, lo: int, width: int, rows: int, pitch: int, mode: int, *, by_host: bool
    ) -> None:
        """Touch rows of memory in the stream of a call, or at once."""
        actor = self._order.host if by_host else self._order.enqueue(call)
        if actor is None or width * rows <= 0:
            return
        if by_host:
            self._order.host_moves_on()
            call = replace(call, stream=0)
        hi = lo + (rows - 1) * pitch + width
        if rows == 1 or pitch in (0, width):
            hi, rows = lo + width * rows, 1
        touch = Touch(actor.slot, actor.tick, call, lo, hi, mode, EXACT)
        self._shadow.add(touch, actor.past, pitch, rows)
