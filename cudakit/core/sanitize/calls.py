"""What the engine keeps of a call, and of each range that it touches, as long as a race may need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cudakit.core.sanitize.clocks import Release
from cudakit.trace.kinds import Known, Mode

# Plain numbers: these are compared for every record of a trace.
READ: Final = int(Mode.READ)
WRITE: Final = int(Mode.WRITE)
ATOMIC: Final = int(Mode.ATOMIC)
EXACT: Final = int(Known.EXACT)
ASSUMED: Final = int(Known.ASSUMED)
UNCERTAIN: Final = int(Known.UNCERTAIN)


# These two are not frozen: that would make them four times as slow to make, and one is made per launch.
@dataclass(slots=True, eq=False)
class Call:
    """A call that enqueued work. Numbers are the trace's, ``name`` is the number of a string."""

    seq: int
    kind: int
    name: int
    stream: int  # 0: the host itself
    context: int
    device: int
    thread: int
    site: int
    graph: int = 0
    node: int = 0
    release: Release | None = (
        None  # of a stream-ordered free: who gets the memory next comes after it
    )


@dataclass(slots=True, eq=False)
class Touch:
    """What a call does to the bytes from ``lo`` up to ``hi``, and when: at a tick of its timeline."""

    slot: int
    tick: int
    call: Call
    lo: int
    hi: int
    mode: int
    known: int


def are_alike(one: Touch | None, other: Touch | None) -> bool:
    """Say whether two touches are ordered alike and would be reported alike."""
    if one is other:
        return True
    if one is None or other is None:
        return False
    mine, theirs = one.call, other.call
    return (
        (one.slot, one.tick, one.mode, one.known)
        == (other.slot, other.tick, other.mode, other.known)
        and (mine.kind, mine.name, mine.site) == (theirs.kind, theirs.name, theirs.site)
        and mine.node == theirs.node
    )
