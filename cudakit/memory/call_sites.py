"""Call stacks with their frames, and the call site: the innermost frame in the code of the program."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cudakit.memory.snapshot import Ids, Snapshot
from cudakit.stacks import Frame, site_rank


def site_name(frame: Frame) -> str:
    """Return a frame as ``folder/file.py:12 function``."""
    short_path = "/".join(frame.filename.replace("\\", "/").split("/")[-2:])
    path_and_line = f"{short_path}:{frame.line}" if frame.line else short_path
    return f"{path_and_line} {frame.name}".strip()


@dataclass(frozen=True)
class StackTable:
    """The call stacks of a snapshot with their frames and call sites, shared by all of its devices."""

    snapshot: Snapshot
    _frames: dict[int, tuple[Frame, ...]] = field(default_factory=dict)
    _sites: dict[int, int] = field(default_factory=dict)

    def frames(self, stack_index: int) -> tuple[Frame, ...]:
        """Return the frames of a stack, innermost first."""
        if stack_index not in self._frames:
            frames = self.snapshot.frames
            self._frames[stack_index] = tuple(
                frames[frame_index] for frame_index in self.snapshot.stacks[stack_index]
            )
        return self._frames[stack_index]

    @cached_property
    def _site_ranks(self) -> list[int]:
        return [site_rank(frame) for frame in self.snapshot.frames]

    def site_index(self, stack_index: int) -> int:
        """Return the index of the call site in a stack: the innermost frame with the lowest ``site_rank``."""
        if stack_index not in self._sites:
            ranks = [
                self._site_ranks[frame_index] for frame_index in self.snapshot.stacks[stack_index]
            ]
            self._sites[stack_index] = ranks.index(min(ranks)) if ranks else 0
        return self._sites[stack_index]

    @cached_property
    def site_frames(self) -> Ids:
        """The frame id of the call site of each stack; -1 for the empty stack."""
        sites = (
            stack[self.site_index(stack_index)] if stack else -1
            for stack_index, stack in enumerate(self.snapshot.stacks)
        )
        return np.fromiter(sites, np.int32, len(self.snapshot.stacks))
