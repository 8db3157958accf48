"""The words of the report: rules, accesses, memory, and how well each is known."""

from __future__ import annotations

from typing import Final

from cudakit.core.sanitize.races import RaceKind
from cudakit.core.sanitize.result import FoundRace, Memory, Side
from cudakit.trace.kinds import How, Known
from cudakit.units import format_bytes

MEANINGS: Final = {
    RaceKind.READ_AFTER_WRITE: "Memory is read while it may still be written.",
    RaceKind.WRITE_AFTER_READ: "Memory is overwritten while it may still be read.",
    RaceKind.WRITE_AFTER_WRITE: "Memory is written by two, and either may be the last.",
    RaceKind.USE_BEFORE_ALLOCATION: "Memory is used before its stream-ordered allocation is done.",
    RaceKind.USE_AFTER_FREE: "Memory is freed while it may still be used, or used afterwards.",
    RaceKind.REUSE: "Memory is handed out again while its last owner's work may still run.",
    RaceKind.HOST: "The host touches memory while a copy of it may still be in flight.",
}

_KNOWN: Final = {
    Known.EXACT: "exact",
    Known.SUMMARY: "seen in pieces that were too many, and were joined",
    Known.ASSUMED: "assumed, from a pointer among its arguments",
    Known.UNCERTAIN: "uncertain, from a table among its arguments that may hold old pointers",
}

_HOW: Final = {
    How.SYNC: "of the device",
    How.STREAM_ORDERED: "stream-ordered",
    How.VIRTUAL: "mapped into a reserved range",
    How.PINNED: "pinned, of the host",
    How.MANAGED: "managed",
    How.GRAPH: "of a graph",
}


def accessed(side: Side) -> str:
    """Say what a side does to which bytes."""
    size, at = format_bytes(side.size_bytes), f"{side.address:#x}"
    does = [word for word, is_so in (("read", side.reads), ("write", side.writes)) if is_so]
    if side.operation in ("allocation", "free") or not does:
        return f"{size} at {at}"
    if side.known >= Known.ASSUMED:
        return f"given {at}, may {' and '.join(does)} up to {size} from there"
    atomically = " atomically" if side.atomic else ""
    return f"{' and '.join(f'{word}s' for word in does)} {size} at {at}{atomically}"


def how_known(found: FoundRace) -> str:
    """Say how well the two sides are known."""
    if found.previous.known is found.current.known is Known.EXACT:
        return "both sides are exact"
    return (
        f"the earlier side is {_KNOWN[found.previous.known]}, "
        f"the later one is {_KNOWN[found.current.known]}"
    )


def memory_words(memory: Memory) -> str:
    """Describe an allocation."""
    return f"{format_bytes(memory.size_bytes)} at {memory.address:#x}, {_HOW[memory.how]}"
