"""Stacks as people read them: frames by id, and the frame that is the program's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.snapshot import Snapshot
from cudakit.document import Frame

_LIBRARY = re.compile(
    r"""(?:^|/)(?:site-packages|dist-packages)/     # installed packages
    | /lib/python3[.\d]*/                           # the standard library
    | ^<                                            # generated code
    | ^(?:\?\?)?$                                   # unknown
    | \.(?:c|cc|cpp|cxx|cu|h|hpp|so[.\d]*)$         # native code
    """,
    re.VERBOSE,
)


def is_library(frame: Frame) -> bool:
    """Say whether a frame belongs to a library, the interpreter or native code."""
    return _LIBRARY.search(frame.filename) is not None


def site_of(frames: tuple[Frame, ...]) -> int:
    """Find the innermost frame of the program's own; 0 where every frame is a library's."""
    return next((i for i, frame in enumerate(frames) if not is_library(frame)), 0)


@dataclass(frozen=True)
class Stacks:
    """The stack table of a snapshot, resolved."""

    snapshot: Snapshot

    def frames(self, stack: int) -> tuple[Frame, ...]:
        """Resolve a stack, innermost frame first."""
        return tuple(self.snapshot.frames[i] for i in self.snapshot.stacks[stack])

    @cached_property
    def _own(self) -> list[bool]:
        return [not is_library(frame) for frame in self.snapshot.frames]

    @cached_property
    def site_frames(self) -> npt.NDArray[np.int32]:
        """For each stack the frame id of its site; -1 for the empty stack."""
        own = self._own
        sites = (
            next((i for i in stack if own[i]), stack[0] if stack else -1)
            for stack in self.snapshot.stacks
        )
        return np.fromiter(sites, np.int32, len(self.snapshot.stacks))
