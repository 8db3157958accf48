"""Short notation for traces: scene.read(1, "x"), scene.wait(2, 1). Each call returns the new races."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cudakit.sanitize.engine import Engine
from cudakit.sanitize.races import Race
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
    HostCall,
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
    HostCallPhase,
    HostMemory,
    Precision,
    StreamFlag,
)
from cudakit.trace.trace_file import pack

READ, WRITE, ATOMIC = AccessMode.READ, AccessMode.WRITE, AccessMode.ATOMIC
LEGACY, BLOCKING = StreamFlag.LEGACY, StreamFlag.BLOCKING
NON_BLOCKING, PER_THREAD = StreamFlag.NON_BLOCKING, StreamFlag.PER_THREAD

SIZE = 256
HOST = 0x10_0000  # first address of host memory
DEVICE = 0x7F00_0000_0000


def address_of(buffer: str | int) -> int:
    """Return the address of a buffer; host buffers have upper-case names."""
    if isinstance(buffer, int):
        return buffer
    base = HOST if buffer.isupper() else DEVICE
    return base + 4096 * sum(ord(letter) << 7 * i for i, letter in enumerate(reversed(buffer)))


class Scene:
    """An engine and its trace. Streams are numbered from 1, and non-blocking by default."""

    def __init__(self, *streams: StreamFlag, **options: int) -> None:
        self.engine = Engine(**options)
        self.seq = 0
        self.strings: dict[str, int] = {"": 0}
        self.call_options: dict[str, Any] = {"context": 1, "thread": 1}
        for number, flag in enumerate(streams or [NON_BLOCKING] * 10, 1):
            self.call(StreamCreate(number, flag))

    def call(self, *bodies: EventBody, **call_options: Any) -> list[Race]:
        """Record one call with its events; return the new races."""
        self.seq += 1
        events = [
            Event(body, **{"seq": self.seq, "site": self.seq, **self.call_options, **call_options})
            for body in bodies
        ]
        return self.feed(events)

    def feed(self, events: Iterable[Event]) -> list[Race]:
        records = pack(list(events), lambda text: self.strings.setdefault(text, len(self.strings)))
        return self.engine.feed(records, list(self.strings))

    def kernel(
        self, stream: int, *accesses: Access, name: str = "k", **call_options: Any
    ) -> list[Race]:
        return self.call(Launch(stream, name), *accesses, **call_options)

    def read(
        self, stream: int, *buffers: str | int, size: int = SIZE, **call_options: Any
    ) -> list[Race]:
        return self.launch_with_accesses(stream, buffers, READ, size, **call_options)

    def write(
        self, stream: int, *buffers: str | int, size: int = SIZE, **call_options: Any
    ) -> list[Race]:
        return self.launch_with_accesses(stream, buffers, WRITE, size, **call_options)

    def atomic(self, stream: int, *buffers: str | int, size: int = SIZE) -> list[Race]:
        return self.launch_with_accesses(stream, buffers, READ | WRITE | ATOMIC, size)

    def launch_with_accesses(
        self,
        stream: int,
        buffers: Iterable[str | int],
        mode: AccessMode,
        size: int,
        **call_options: Any,
    ) -> list[Race]:
        addresses = [address_of(buffer) for buffer in buffers]
        return self.kernel(
            stream, *(Access(lo, lo + size, mode) for lo in addresses), **call_options
        )

    def launch_with_pointers(
        self,
        stream: int,
        *pointer_states: int | str,
        end: int = 0,
        precision: Precision = Precision.ASSUMED,
        **call_options: Any,
    ) -> list[Race]:
        """Launch a kernel whose accesses are assumed from its pointer arguments."""
        addresses = [address_of(pointer) for pointer in pointer_states]
        return self.kernel(
            stream,
            *(Access(lo, end or lo + 4096, READ | WRITE, precision) for lo in addresses),
            **call_options,
        )

    def record(self, event: int, stream: int, **call_options: Any) -> list[Race]:
        return self.call(EventRecord(event, stream), **call_options)

    def wait(self, stream: int, event: int, **call_options: Any) -> list[Race]:
        return self.call(StreamWait(stream, event), **call_options)

    def event_sync(self, event: int, **call_options: Any) -> list[Race]:
        return self.call(EventSync(event), **call_options)

    def event_query(self, event: int) -> list[Race]:
        return self.call(EventQueryOk(event))

    def host_function(self, stream: int, event: int) -> list[Race]:
        """Enqueue a host function; the recorder records an event of its own before the function."""
        return self.record(event, stream)

    def run_host_function(self, stream: int, event: int) -> list[Race]:
        """Run the host function that was enqueued after the event."""
        return self.call(
            HostCall(stream, HostCallPhase.BEGIN, event), HostCall(stream, HostCallPhase.END, event)
        )

    def sync(self, stream: int, **call_options: Any) -> list[Race]:
        return self.call(StreamSync(stream), **call_options)

    def query(self, stream: int) -> list[Race]:
        return self.call(StreamQueryOk(stream))

    def device_sync(self, **call_options: Any) -> list[Race]:
        return self.call(ContextSync(), **call_options)

    def create(
        self, stream: int, flag: StreamFlag = NON_BLOCKING, **call_options: Any
    ) -> list[Race]:
        return self.call(StreamCreate(stream, flag), **call_options)

    def destroy(self, stream: int) -> list[Race]:
        return self.call(StreamDestroy(stream))

    def copy(
        self,
        stream: int,
        destination: str | int,
        source: str | int,
        direction: Direction = Direction.DEVICE_TO_DEVICE,
        host: HostMemory = HostMemory.NONE,
        *,
        asynchronous: bool = True,
        **call_options: Any,
    ) -> list[Race]:
        body = Copy(
            stream,
            address_of(destination),
            address_of(source),
            SIZE,
            direction=direction,
            host=host,
            asynchronous=asynchronous,
        )
        return self.call(body, **call_options)

    def fill(self, stream: int, buffer: str | int, *, asynchronous: bool = True) -> list[Race]:
        return self.call(Fill(stream, address_of(buffer), SIZE, asynchronous=asynchronous))

    def alloc(
        self,
        buffer: str | int,
        kind: AllocationKind = AllocationKind.SYNC,
        stream: int = 0,
        **options: Any,
    ) -> list[Race]:
        size = options.pop("size", SIZE)
        return self.call(Alloc(address_of(buffer), size, kind, stream, **options))

    def free(
        self,
        buffer: str | int,
        kind: AllocationKind = AllocationKind.SYNC,
        stream: int = 0,
        **options: Any,
    ) -> list[Race]:
        size = options.pop("size", SIZE)
        return self.call(Free(address_of(buffer), size, kind, stream, **options))
