"""A race of the engine with words and stacks: numbers of the trace become what they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cudakit.core.sanitize import hint
from cudakit.core.sanitize.frameworks import remedies
from cudakit.core.sanitize.names import Demangle, short_kernel, stream_name
from cudakit.core.sanitize.races import Allocation, Operation, Race, Sync
from cudakit.core.sanitize.result import FoundRace, Memory, Side, Synchronisation
from cudakit.core.sanitize.stacks import place, site
from cudakit.document import Frame
from cudakit.trace.kinds import Kind, Mode, StreamFlag

_OPERATIONS = {
    Kind.COPY: "copy",
    Kind.FILL: "fill",
    Kind.ALLOC: "allocation",
    Kind.FREE: "free",
}


class Stacks(Protocol):
    """Gives the number of a stack its frames, innermost first."""

    def __call__(self, number: int, /) -> tuple[Frame, ...]: ...


@dataclass(frozen=True, slots=True)
class Reader:
    """What the numbers of one process stand for."""

    process: int
    stacks: Stacks
    streams: Mapping[int, StreamFlag]
    demangle: Demangle

    def found(self, race: Race) -> FoundRace:
        """Say in words and stacks what was found, once."""
        current, previous = self.side(race.current), self.side(race.previous)
        memory = self._memory(race.allocation)
        size_bytes = race.hi - race.lo
        return FoundRace(
            kind=race.kind,
            confidence=race.confidence,
            sentence=hint.sentence(race.kind, current, previous, size_bytes),
            address=race.lo,
            size_bytes=size_bytes,
            offset_bytes=race.lo - memory.address if memory else None,
            count=1,
            current=current,
            previous=previous,
            hint=hint.fix(race.kind, current, previous),
            remedies=remedies(race.kind, current, previous, memory.stack if memory else ()),
            memory=memory,
            last_sync=self._synchronisation(race.last_sync, current, previous),
            approximate=race.approximate,
            process=self.process,
        )

    def side(self, operation: Operation) -> Side:
        """Make a side of an operation."""
        stack = self.stacks(operation.site)
        kernel = self.demangle(operation.name) if operation.kind is Kind.LAUNCH else None
        return Side(
            stream=stream_name(
                operation.stream, self.streams.get(operation.stream), operation.thread
            ),
            operation=_operation(operation.kind, kernel),
            stack=stack,
            site=site(stack),
            stream_number=operation.stream,
            device=operation.device,
            context=operation.context,
            thread=operation.thread,
            seq=operation.seq,
            kernel=kernel,
            mangled=None if kernel is None else operation.name,
            reads=Mode.READ in operation.mode,
            writes=Mode.WRITE in operation.mode,
            atomic=Mode.ATOMIC in operation.mode,
            known=operation.known,
            address=operation.lo,
            size_bytes=operation.hi - operation.lo,
            graph=operation.graph,
            node=operation.node,
        )

    def _memory(self, allocation: Allocation | None) -> Memory | None:
        if allocation is None:
            return None
        stack = self.stacks(allocation.site)
        return Memory(
            address=allocation.address,
            size_bytes=allocation.size_bytes,
            how=allocation.how,
            seq=allocation.seq,
            stack=stack,
            site=site(stack),
        )

    def _synchronisation(
        self, sync: Sync | None, current: Side, previous: Side
    ) -> Synchronisation | None:
        if sync is None:
            return None
        recorded, waited = self.stacks(sync.recorded_site), self.stacks(sync.waited_site)
        return Synchronisation(
            kind=sync.kind,
            sentence=hint.why_not_covered(
                sync.kind, current, previous, place(recorded), place(waited)
            ),
            recorded_seq=sync.recorded_seq,
            recorded_stack=recorded,
            recorded_site=site(recorded),
            waited_seq=sync.waited_seq,
            waited_stack=waited,
            waited_site=site(waited),
        )


def _operation(kind: Kind, kernel: str | None) -> str:
    if kernel is None:
        return _OPERATIONS.get(kind, kind.name.lower().replace("_", " "))
    return f"kernel {short_kernel(kernel)}" if kernel else "a kernel without a name"
