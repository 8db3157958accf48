"""Short notation for traces: R(s, x), W(s, x), record, wait. Each call returns the new races."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cudakit.core.sanitize.engine import Engine
from cudakit.core.sanitize.races import Race
from cudakit.trace.events import (
    Access,
    Alloc,
    ContextSync,
    Copy,
    Event,
    EventBody,
    EventQueryOk,
    EventRecord,
    EventSync,
    Fill,
    Free,
    Launch,
    StreamCreate,
    StreamDestroy,
    StreamQueryOk,
    StreamSync,
    StreamWait,
)
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    Direction,
    HostMemory,
    Precision,
    StreamFlag,
)
from cudakit.trace.layout import pack

READ, WRITE, ATOMIC = AccessMode.READ, AccessMode.WRITE, AccessMode.ATOMIC
LEGACY, BLOCKING = StreamFlag.LEGACY, StreamFlag.BLOCKING
NON_BLOCKING, PER_THREAD = StreamFlag.NON_BLOCKING, StreamFlag.PER_THREAD

SIZE = 256
HOST = 0x10_0000  # first address of host memory
DEVICE = 0x7F00_0000_0000


def place(buffer: str | int) -> int:
    """Return the address of a buffer; host buffers have upper-case names."""
    if isinstance(buffer, int):
        return buffer
    base = HOST if buffer.isupper() else DEVICE
    return base + 4096 * sum(ord(letter) << 7 * i for i, letter in enumerate(reversed(buffer)))


class Scene:
    """An engine and its trace. Streams are numbered from 1, and non-blocking by default."""

    def __init__(self, *streams: StreamFlag, **options: bool) -> None:
        self.engine = Engine(**options)
        self.seq = 0
        self.strings: dict[str, int] = {"": 0}
        self.where: dict[str, Any] = {"context": 1, "thread": 1}
        for number, flag in enumerate(streams or [NON_BLOCKING] * 10, 1):
            self.call(StreamCreate(number, flag))

    def call(self, *bodies: EventBody, **where: Any) -> list[Race]:
        """Record one call with its facts."""
        self.seq += 1
        events = [
            Event(body, **{"seq": self.seq, "site": self.seq, **self.where, **where})
            for body in bodies
        ]
        return self.feed(events)

    def feed(self, events: Iterable[Event]) -> list[Race]:
        records = pack(list(events), lambda text: self.strings.setdefault(text, len(self.strings)))
        return self.engine.feed(records, list(self.strings))

    def kernel(self, stream: int, *accesses: Access, name: str = "k", **where: Any) -> list[Race]:
        return self.call(Launch(stream, name), *accesses, **where)

    def R(self, stream: int, *buffers: str | int, size: int = SIZE, **where: Any) -> list[Race]:  # noqa: N802 - the notation of the scenarios
        return self.touch(stream, buffers, READ, size, **where)

    def W(self, stream: int, *buffers: str | int, size: int = SIZE, **where: Any) -> list[Race]:  # noqa: N802 - the notation of the scenarios
        return self.touch(stream, buffers, WRITE, size, **where)

    def A(self, stream: int, *buffers: str | int, size: int = SIZE) -> list[Race]:  # noqa: N802 - the notation of the scenarios
        return self.touch(stream, buffers, READ | WRITE | ATOMIC, size)

    def touch(
        self, stream: int, buffers: Iterable[str | int], mode: AccessMode, size: int, **where: Any
    ) -> list[Race]:
        los = [place(buffer) for buffer in buffers]
        return self.kernel(stream, *(Access(lo, lo + size, mode) for lo in los), **where)

    def given(
        self,
        stream: int,
        *pointer_states: int | str,
        end: int = 0,
        known: Precision = Precision.ASSUMED,
        **where: Any,
    ) -> list[Race]:
        """Launch a kernel whose accesses are assumed from its pointer arguments."""
        los = [place(pointer) for pointer in pointer_states]
        return self.kernel(
            stream, *(Access(lo, end or lo + 4096, READ | WRITE, known) for lo in los), **where
        )

    def record(self, event: int, stream: int, **where: Any) -> list[Race]:
        return self.call(EventRecord(event, stream), **where)

    def wait(self, stream: int, event: int, **where: Any) -> list[Race]:
        return self.call(StreamWait(stream, event), **where)

    def event_sync(self, event: int, **where: Any) -> list[Race]:
        return self.call(EventSync(event), **where)

    def event_query(self, event: int) -> list[Race]:
        return self.call(EventQueryOk(event))

    def sync(self, stream: int, **where: Any) -> list[Race]:
        return self.call(StreamSync(stream), **where)

    def query(self, stream: int) -> list[Race]:
        return self.call(StreamQueryOk(stream))

    def device_sync(self, **where: Any) -> list[Race]:
        return self.call(ContextSync(), **where)

    def create(self, stream: int, flag: StreamFlag = NON_BLOCKING, **where: Any) -> list[Race]:
        return self.call(StreamCreate(stream, flag), **where)

    def destroy(self, stream: int) -> list[Race]:
        return self.call(StreamDestroy(stream))

    def copy(
        self,
        stream: int,
        to: str | int,
        source: str | int,
        direction: Direction = Direction.DEVICE_TO_DEVICE,
        host: HostMemory = HostMemory.NONE,
        *,
        asynchronous: bool = True,
        **where: Any,
    ) -> list[Race]:
        body = Copy(
            stream,
            place(to),
            place(source),
            SIZE,
            direction=direction,
            host=host,
            asynchronous=asynchronous,
        )
        return self.call(body, **where)

    def fill(self, stream: int, buffer: str | int, *, asynchronous: bool = True) -> list[Race]:
        return self.call(Fill(stream, place(buffer), SIZE, asynchronous=asynchronous))

    def alloc(
        self,
        buffer: str | int,
        how: AllocationKind = AllocationKind.SYNC,
        stream: int = 0,
        **options: Any,
    ) -> list[Race]:
        size = options.pop("size", SIZE)
        return self.call(Alloc(place(buffer), size, how, stream, **options))

    def free(
        self,
        buffer: str | int,
        how: AllocationKind = AllocationKind.SYNC,
        stream: int = 0,
        **options: Any,
    ) -> list[Race]:
        size = options.pop("size", SIZE)
        return self.call(Free(place(buffer), size, how, stream, **options))
