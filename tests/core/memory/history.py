"""What a simulated allocator went through, and what a recording of it keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from core.memory import builders
from core.memory.areas import Truth
from core.memory.builders import Entry

from cudakit.core.memory.replay import Replay, replay
from cudakit.core.memory.replay.lifetimes import BEFORE_TRACE
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot
from cudakit.torch_rules.actions import Action


@dataclass(frozen=True, slots=True)
class Life:
    """One allocation; its events as the replay numbers them: BEFORE_TRACE the first, or n for not yet."""

    address: int
    size: int
    requested: int
    stream: int
    pool: int
    stack: int
    begin: int
    free_requested: int
    end: int


@dataclass(frozen=True, slots=True)
class History:
    """The entries of a trace, the truth at each moment, and every allocation that they tell of."""

    entries: tuple[Entry, ...]
    truths: tuple[Truth, ...]  # one more than entries
    lives: tuple[Life, ...]
    settings: Mapping[str, object]

    def last(self, n: int) -> History:
        """Keep the last n entries, as a ring buffer does."""
        dropped = len(self.entries) - n
        ended = [life for life in self.lives if life.end >= dropped]
        return replace(
            self,
            entries=self.entries[dropped:],
            truths=self.truths[dropped:],
            lives=tuple(
                _moved(life, lambda event: max(event - dropped, BEFORE_TRACE)) for life in ended
            ),
        )

    def with_merged_frees(self) -> History:
        """Write a free that completes at once as one entry, as viewers do."""
        entries: list[Entry] = []
        truths = [self.truths[0]]
        place = {BEFORE_TRACE: BEFORE_TRACE}  # where an entry went
        for i, (entry, truth) in enumerate(zip(self.entries, self.truths[1:], strict=True)):
            if entries and _completes(entry, self.entries[i - 1]):
                entries[-1] = replace(entries[-1], action=Action.FREE)
                truths[-1] = truth
            else:
                entries.append(entry)
                truths.append(truth)
            place[i] = len(entries) - 1
        place[len(self.entries)] = len(entries)
        lives = tuple(_moved(life, place.__getitem__) for life in self.lives)
        return replace(self, entries=tuple(entries), truths=tuple(truths), lives=lives)

    def without(self, dropped: Collection[int]) -> History:
        """Leave out entries, as skip_actions does. What is said of lives no longer holds."""
        kept = [i for i in range(len(self.entries)) if i not in dropped]
        truths = (self.truths[0], *(self.truths[i + 1] for i in kept))
        return replace(self, entries=tuple(self.entries[i] for i in kept), truths=truths, lives=())

    def known_stack(self, life: Life) -> int:
        """Say what can be known of who allocated: nothing where only the free was recorded."""
        is_unseen = life.begin == BEFORE_TRACE and life.end < len(self.entries)
        return 0 if is_unseen else life.stack

    def shows_every_end(self) -> bool:
        """Say whether the trace can tell the size of every block.

        It cannot of a block from before the trace that is gone at the end, if nothing that is kept
        ever lay right behind it.
        """
        return all(self.shows_end(life) for life in self.lives if life.begin == BEFORE_TRACE)

    def shows_end(self, life: Life) -> bool:
        stop = life.address + life.size
        if life.size == -(-life.requested // 512) * 512 or life.end == len(self.entries):
            return True
        return any(
            stop in (segment.address + segment.size, *(block.address for block in segment.blocks))
            for truth in self.truths[: life.end + 1]
            for segment in truth.segments
        )

    def trace(self) -> DeviceTrace:
        return builders.trace(self.entries, self.truths[-1].segments)

    def snapshot(self) -> Snapshot:
        return builders.snapshot(self.trace(), settings=self.settings)

    def replay(self) -> Replay:
        snapshot = self.snapshot()
        return replay(snapshot, snapshot.devices[0])


def _completes(entry: Entry, before: Entry) -> bool:
    pair = (before.action, entry.action)
    both = (Action.FREE_REQUESTED, Action.FREE_COMPLETED)
    return pair == both and entry.address == before.address


def _moved(life: Life, to: Callable[[int], int]) -> Life:
    return replace(
        life, begin=to(life.begin), free_requested=to(life.free_requested), end=to(life.end)
    )
