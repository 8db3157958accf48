"""The history of a simulated allocator, and recordings that keep a part of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from memory import builders
from memory.areas import ExpectedState
from memory.builders import Entry

from cudakit.memory.history import History, reconstruct
from cudakit.memory.snapshot import BEFORE_TRACE, Action, DeviceTrace, Snapshot


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One allocation. Events are numbered as in the replay: BEFORE_TRACE, or n for not yet."""

    address: int
    size: int
    requested: int
    stream: int
    pool: int
    stack: int
    begin: int
    free_request: int
    end: int


@dataclass(frozen=True, slots=True)
class SimulatedHistory:
    """The entries of a trace, the expected state at each moment, and all allocations."""

    entries: tuple[Entry, ...]
    expected_states: tuple[ExpectedState, ...]  # one more than entries
    lifetimes: tuple[Lifetime, ...]
    settings: Mapping[str, object]

    def last(self, n: int) -> SimulatedHistory:
        """Keep the last n entries, as with ``max_entries``."""
        dropped = len(self.entries) - n
        ended = [lifetime for lifetime in self.lifetimes if lifetime.end >= dropped]
        return replace(
            self,
            entries=self.entries[dropped:],
            expected_states=self.expected_states[dropped:],
            lifetimes=tuple(
                _renumbered(lifetime, lambda event: max(event - dropped, BEFORE_TRACE))
                for lifetime in ended
            ),
        )

    def with_merged_frees(self) -> SimulatedHistory:
        """Merge the two entries of a free that completes at once into one, as viewers do."""
        entries: list[Entry] = []
        expected_states = [self.expected_states[0]]
        place = {BEFORE_TRACE: BEFORE_TRACE}  # new index by old index
        for i, (entry, expected_state) in enumerate(
            zip(self.entries, self.expected_states[1:], strict=True)
        ):
            if entries and _completes(entry, self.entries[i - 1]):
                entries[-1] = replace(entries[-1], action=Action.FREE)
                expected_states[-1] = expected_state
            else:
                entries.append(entry)
                expected_states.append(expected_state)
            place[i] = len(entries) - 1
        place[len(self.entries)] = len(entries)
        return replace(
            self,
            entries=tuple(entries),
            expected_states=tuple(expected_states),
            lifetimes=tuple(
                _renumbered(lifetime, place.__getitem__) for lifetime in self.lifetimes
            ),
        )

    def without(self, dropped: Collection[int]) -> SimulatedHistory:
        """Remove entries, as ``skip_actions`` does, and all lifetimes, which would be wrong."""
        kept = [i for i in range(len(self.entries)) if i not in dropped]
        expected_states = (self.expected_states[0], *(self.expected_states[i + 1] for i in kept))
        return replace(
            self,
            entries=tuple(self.entries[i] for i in kept),
            expected_states=expected_states,
            lifetimes=(),
        )

    def knowable_stack(self, lifetime: Lifetime) -> int:
        """Return the stack of an allocation; 0 if only its free was recorded."""
        is_unseen = lifetime.begin == BEFORE_TRACE and lifetime.end < len(self.entries)
        return 0 if is_unseen else lifetime.stack

    def determines_every_size(self) -> bool:
        """Return whether the trace determines the size of every block.

        It does not for a block from before the trace that was freed, if no block was ever directly after it.
        """
        return all(
            self.determines_size(lifetime)
            for lifetime in self.lifetimes
            if lifetime.begin == BEFORE_TRACE
        )

    def determines_size(self, lifetime: Lifetime) -> bool:
        stop = lifetime.address + lifetime.size
        if lifetime.size == -(-lifetime.requested // 512) * 512 or lifetime.end == len(
            self.entries
        ):
            return True
        return any(
            stop in (segment.address + segment.size, *(block.address for block in segment.blocks))
            for expected_state in self.expected_states[: lifetime.end + 1]
            for segment in expected_state.segments
        )

    def trace(self) -> DeviceTrace:
        return builders.trace(self.entries, self.expected_states[-1].segments)

    def snapshot(self) -> Snapshot:
        return builders.snapshot(self.trace(), settings=self.settings)

    def reconstruct(self) -> History:
        snapshot = self.snapshot()
        return reconstruct(snapshot, snapshot.devices[0])


def _completes(entry: Entry, before: Entry) -> bool:
    pair = (before.action, entry.action)
    both = (Action.FREE_REQUESTED, Action.FREE_COMPLETED)
    return pair == both and entry.address == before.address


def _renumbered(lifetime: Lifetime, to: Callable[[int], int]) -> Lifetime:
    return replace(
        lifetime,
        begin=to(lifetime.begin),
        free_request=to(lifetime.free_request),
        end=to(lifetime.end),
    )
