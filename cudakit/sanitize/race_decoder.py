"""Decode races: replace the numbers of a trace by names, call stacks and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from cudakit.sanitize.hints import (
    RacingStreams,
    is_wait,
    race_sentence,
    remedies,
    smallest_fix,
    why_not_covered,
)
from cudakit.sanitize.known_issues import known_issue
from cudakit.sanitize.names import (
    Demangle,
    call_site,
    collective_name,
    stream_name,
)
from cudakit.sanitize.owners import StreamUse
from cudakit.sanitize.races import Allocation, Operation, Race, Sync
from cudakit.sanitize.result import FoundRace, LastSync, Memory, Side
from cudakit.stacks import Frame, call_site_index
from cudakit.trace.kernel_names import short_kernel
from cudakit.trace.kinds import AccessMode, EventKind, StreamFlag

_OPERATION_NAMES = {
    EventKind.COPY: "copy",
    EventKind.FILL: "fill",
    EventKind.ALLOC: "allocation",
    EventKind.FREE: "free",
}


class Stacks(Protocol):
    """Returns the frames of a stack by its number, innermost first."""

    def __call__(self, number: int, /) -> tuple[Frame, ...]: ...


@dataclass(frozen=True, slots=True)
class RaceDecoder:
    """Decodes the races of one process: replaces numbers of the trace by names, call stacks and sentences."""

    process: int
    stacks: Stacks
    flag_by_stream: Mapping[int, StreamFlag]
    demangle: Demangle
    stream_use: StreamUse = field(default_factory=StreamUse)

    def decode(self, race: Race) -> FoundRace:
        """Return a race in the form of the report, with one occurrence."""
        current_side, previous_side = self.side(race.current), self.side(race.previous)
        memory = self._memory(race.allocation)
        size_bytes = race.hi - race.lo
        return FoundRace(
            kind=race.kind,
            confidence=race.confidence,
            sentence=race_sentence(race.kind, current_side, previous_side, size_bytes),
            address=race.lo,
            size_bytes=size_bytes,
            offset_bytes=race.lo - memory.address if memory else None,
            count=1,
            current=current_side,
            previous=previous_side,
            hint=smallest_fix(race.kind, current_side, previous_side),
            hint_checked=is_wait(race.kind, previous_side),
            remedies=remedies(
                race.kind, current_side, previous_side, memory.stack if memory else ()
            ),
            memory=memory,
            last_sync=self._last_sync(race.last_sync, current_side, previous_side),
            approximate=race.is_approximate,
            process=self.process,
            known_issue=known_issue(current_side, previous_side),
        )

    def with_streams(
        self, race: FoundRace, earlier_streams: Mapping[int, int], later_streams: Mapping[int, int]
    ) -> FoundRace:
        """Return a race with a fix that names the streams of all its occurrences in the process.

        ``earlier_streams`` and ``later_streams`` have the device of each stream.
        """
        race_sides = race.kind, race.current, race.previous
        unreachable_names = [
            self._stream_name(stream)
            for stream in sorted({*earlier_streams, *later_streams})
            if not self.stream_use.is_reachable(stream)
        ]
        names = self._stream_names({**earlier_streams, **later_streams})
        racing_streams = RacingStreams(
            earlier_names=tuple(names[stream] for stream in sorted(earlier_streams)),
            later_names=tuple(names[stream] for stream in sorted(later_streams)),
            unreachable_name=unreachable_names[0] if unreachable_names else "",
        )
        allocation_stack = race.memory.stack if race.memory else ()
        return replace(
            race,
            hint=smallest_fix(*race_sides, racing_streams),
            remedies=remedies(*race_sides, allocation_stack, racing_streams),
        )

    def _stream_names(self, device_by_stream: Mapping[int, int]) -> dict[int, str]:
        """Return the names of streams, with the device if streams of several devices have the same name."""
        names = {stream: self._stream_name(stream) for stream in device_by_stream}
        if len(set(device_by_stream.values())) == 1:
            return names
        name_counts = Counter(names.values())
        return {
            stream: name if name_counts[name] == 1 else f"{name} of cuda:{device_by_stream[stream]}"
            for stream, name in names.items()
        }

    def _stream_name(self, stream: int) -> str:
        """Return the name of a stream without its properties."""
        return stream_name(stream, self.flag_by_stream.get(stream)).partition(" (")[0]

    def side(self, operation: Operation) -> Side:
        """Return an operation as a side of a race."""
        stack = self.stacks(operation.site)
        launch_stack = self.stacks(operation.launch_site) if operation.launch_site else ()
        has_kernel = operation.kind in (EventKind.LAUNCH, EventKind.COLLECTIVE)
        kernel = self.demangle(operation.name) if has_kernel else None
        return Side(
            stream=stream_name(operation.stream, self.flag_by_stream.get(operation.stream)),
            operation=(
                collective_name(operation.collective)
                if operation.collective
                else _operation_text(operation.kind, kernel)
            ),
            stack=stack,
            site=call_site_index(stack),
            stream_number=operation.stream,
            device=operation.device,
            context=operation.context,
            thread=operation.thread,
            seq=operation.seq,
            kernel=kernel,
            mangled=None if kernel is None else operation.name,
            reads=AccessMode.READ in operation.mode,
            writes=AccessMode.WRITE in operation.mode,
            atomic=AccessMode.ATOMIC in operation.mode,
            known=operation.precision,
            address=operation.lo,
            size_bytes=operation.hi - operation.lo,
            graph=operation.graph,
            node=operation.node,
            ranges=operation.ranges,
            from_template=operation.from_template,
            collective=operation.collective,
            accessed_bytes=operation.accessed_bytes,
            launch_stack=launch_stack,
            launch_site=call_site_index(launch_stack),
        )

    def _memory(self, allocation: Allocation | None) -> Memory | None:
        if allocation is None:
            return None
        stack = self.stacks(allocation.site)
        return Memory(
            address=allocation.address,
            size_bytes=allocation.size_bytes,
            how=allocation.kind,
            seq=allocation.seq,
            stack=stack,
            site=call_site_index(stack),
        )

    def _last_sync(
        self, sync: Sync | None, current_side: Side, previous_side: Side
    ) -> LastSync | None:
        if sync is None:
            return None
        record_stack, wait_stack = self.stacks(sync.recorded_site), self.stacks(sync.waited_site)
        return LastSync(
            kind=sync.kind,
            sentence=why_not_covered(
                sync.kind,
                current_side,
                previous_side,
                call_site(record_stack),
                call_site(wait_stack),
            ),
            recorded_seq=sync.recorded_seq,
            recorded_stack=record_stack,
            recorded_site=call_site_index(record_stack),
            waited_seq=sync.waited_seq,
            waited_stack=wait_stack,
            waited_site=call_site_index(wait_stack),
        )


def _operation_text(kind: EventKind, kernel: str | None) -> str:
    if kernel is None:
        return _OPERATION_NAMES.get(kind, kind.name.lower().replace("_", " "))
    return f"kernel {short_kernel(kernel)}" if kernel else "a kernel without a name"
