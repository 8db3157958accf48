"""A trace of 50 rounds: one stream gathers rows of a table by an index, another stream writes other rows.

In one round the wait between the streams can be missing, and the index can contain a row that is written. The
waits of all rounds can be missing, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from sanitize.template_player import apply

from cudakit.trace.events import (
    Access,
    Accessed,
    Alloc,
    ContextSync,
    Event,
    EventBody,
    EventRecord,
    Launch,
    StreamCreate,
    StreamWait,
)
from cudakit.trace.kinds import AccessMode, AllocationKind, Precision, StreamFlag
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import Records, pack

ROUNDS = 50
TABLE, TABLE_BYTES = 0x7F00_0000_0000, 1 << 16
WRITTEN = TABLE + TABLE_BYTES // 2  # address of the first row that the second stream writes
GATHERS, WRITES = 1, 2  # numbers of the streams
STRINGS = ["", "gather", "scale"]
READ_OR_WRITE = AccessMode.READ | AccessMode.WRITE


def gather_rounds(
    *, changed_round: int, without_wait: bool, with_other_index: bool, has_waits: bool = True
) -> Records:
    """Return the records of the trace with exact accesses; rounds are counted from 0."""
    calls = _calls(changed_round, without_wait, with_other_index, has_waits)
    events = [Event(body, seq=seq, context=1) for seq, call in enumerate(calls, 1) for body in call]
    return pack(events, STRINGS.index)


def templates_batch(records: Records) -> Batch:
    """Return the trace that --accesses auto would have recorded."""
    return Batch(1, apply(records), STRINGS, [()], 0, False)


def _calls(
    changed_round: int, without_wait: bool, with_other_index: bool, has_waits: bool
) -> Iterator[list[EventBody]]:
    """Yield the events of each call."""
    yield [StreamCreate(GATHERS, StreamFlag.NON_BLOCKING)]
    yield [StreamCreate(WRITES, StreamFlag.NON_BLOCKING)]
    yield [Alloc(TABLE, TABLE_BYTES, AllocationKind.SYNC)]
    for number in range(ROUNDS):
        is_changed = number == changed_round
        row = WRITTEN if is_changed and with_other_index else TABLE + 4096
        yield _launch(GATHERS, "gather", TABLE, Access(row, row + 64, AccessMode.READ))
        yield [EventRecord(GATHERS, 1)]
        if has_waits and not (is_changed and without_wait):
            yield [StreamWait(WRITES, 1)]
        written_rows = Access(WRITTEN, WRITTEN + 4096, READ_OR_WRITE)
        yield _launch(WRITES, "scale", WRITTEN, written_rows)
        yield [ContextSync()]


def _launch(stream: int, name: str, pointer: int, access: Access) -> list[EventBody]:
    end = TABLE + TABLE_BYTES
    assumed = Access(pointer, end, READ_OR_WRITE, Precision.ASSUMED)
    return [Launch(stream, name, pending=True), assumed, access, Accessed(exact=True)]
