from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traces import events

from cudakit.errors import InputError
from cudakit.stacks import Frame, Stack
from cudakit.trace.events import Event, Launch, Mark
from cudakit.trace.trace_file import RECORD_BYTES, Clock, TraceReader, TraceWriter, unpack

# All examples of a test use the same directory; each example writes a new file.
SAME_DIRECTORY = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50
)


def write_trace(path: Path, trace: Sequence[Event], stacks: Sequence[Stack] = ()) -> Path:
    path.unlink(missing_ok=True)
    with TraceWriter(path, clock=Clock.VIRTUAL) as writer:
        for stack in stacks:
            writer.stack(stack)
        for event in trace:
            writer.write(event)
    return path


def read(path: Path) -> list[Event]:
    with TraceReader(path) as reader:
        return unread_events(reader)


def unread_events(reader: TraceReader) -> list[Event]:
    return [event for batch in reader.batches() for event in unpack(batch, reader.strings)]


def marks(count: int) -> list[Event]:
    return [Event(Mark(name=f"mark {index}"), seq=index) for index in range(count)]


@SAME_DIRECTORY
@given(trace=st.lists(events(), max_size=8))
def test_reader_returns_the_written_events(tmp_path: Path, trace: list[Event]) -> None:
    assert read(write_trace(tmp_path / "trace", trace)) == trace


def test_records_are_returned_in_batches(tmp_path: Path) -> None:
    trace = marks(2000)
    with TraceReader(write_trace(tmp_path / "trace", trace)) as reader:
        batches = list(reader.batches(records=300))

        assert max(map(len, batches)) <= 300
        assert [event for batch in batches for event in unpack(batch, reader.strings)] == trace


@SAME_DIRECTORY
@given(data=st.data())
def test_truncated_file_is_read_up_to_the_end(tmp_path: Path, data: st.DataObject) -> None:
    trace = marks(600)
    path = write_trace(tmp_path / "trace", trace)
    content = path.read_bytes()
    truncated_length = data.draw(st.integers(32, len(content)))
    path.write_bytes(content[:truncated_length])

    events_read = read(path)

    assert events_read == trace[: len(events_read)]
    # Only the truncated block may be lost.
    complete_blocks = content[:truncated_length].count(b"rcds")
    assert len(events_read) >= 512 * max(complete_blocks - 1, 0)


def test_only_the_truncated_record_of_a_block_is_lost(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace", marks(10))
    path.write_bytes(path.read_bytes()[: -RECORD_BYTES - 1])

    assert read(path) == marks(8)


def test_reader_returns_events_written_after_the_last_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with TraceWriter(path, clock=Clock.MONOTONIC) as writer, TraceReader(path) as reader:
        assert unread_events(reader) == []
        for event in marks(3):
            writer.write(event)
            writer.flush()
            assert unread_events(reader) == [event]
        assert unread_events(reader) == []


def test_incomplete_block_is_read_once_complete(tmp_path: Path) -> None:
    content = write_trace(tmp_path / "trace", marks(100)).read_bytes()
    growing_path = tmp_path / "growing"
    growing_path.write_bytes(content[:40])
    events_read = []
    with TraceReader(growing_path) as reader, growing_path.open("ab") as file:
        for begin in range(40, len(content), 777):
            file.write(content[begin : begin + 777])
            file.flush()
            events_read += unread_events(reader)

    assert events_read == marks(100)


def test_stacks_are_stored_once_with_indices_from_one(tmp_path: Path) -> None:
    inner, outer = Frame("step", "train.py", 12), Frame("<module>", "train.py", 30)
    path = tmp_path / "trace"
    with TraceWriter(path, clock=Clock.VIRTUAL) as writer:
        sites = [writer.stack(stack) for stack in ((inner, outer), (outer,), (inner, outer), ())]
        writer.write(Event(Launch(stream=1, name="k"), site=sites[0]))

    with TraceReader(path) as reader:
        (event,) = unread_events(reader)

        assert sites == [1, 2, 1, 0]
        assert reader.stacks == [(), (inner, outer), (outer,)]
        assert reader.stacks[event.site][0] == inner


def test_header_names_the_clock(tmp_path: Path) -> None:
    with TraceReader(write_trace(tmp_path / "trace", [])) as reader:
        assert reader.clock is Clock.VIRTUAL


def test_names_that_are_not_utf8_survive(tmp_path: Path) -> None:
    trace = [Event(Mark(name=b"caf\xe9".decode("utf-8", "surrogateescape")))]

    assert read(write_trace(tmp_path / "trace", trace)) == trace


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace", marks(1))

    with pytest.raises(FileExistsError):
        TraceWriter(path, clock=Clock.VIRTUAL)


@pytest.mark.parametrize(
    "content", [b"", b"cudakit\n", b"PK" + bytes(60)], ids=["empty", "cut", "zip"]
)
def test_file_that_is_not_a_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)

    with pytest.raises(InputError, match="is not a trace"):
        TraceReader(path)


def test_trace_of_another_version_is_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace", [])
    content = bytearray(path.read_bytes())
    content[8] = 99
    path.write_bytes(content)

    with pytest.raises(InputError, match="version 99"):
        TraceReader(path)


@pytest.mark.parametrize(
    "block",
    [
        struct.pack("<4sIQ", b"junk", 1, 0),
        struct.pack("<4sIQI", b"text", 1, 4, 1000),
        struct.pack("<4sIQ", b"text", 5, 0),
        struct.pack("<4sIQI3I", b"stak", 1, 16, 1, 7, 7, 7),
        struct.pack("<4sIQI", b"stak", 1, 4, 1 << 31),
    ],
)
def test_damaged_table_is_refused(tmp_path: Path, block: bytes) -> None:
    path = write_trace(tmp_path / "trace", [])
    path.write_bytes(path.read_bytes() + block)

    with pytest.raises(InputError, match="is damaged"):
        read(path)


def test_trace_continues_in_another_file_with_the_same_indices(tmp_path: Path) -> None:
    frame = Frame("step", "train.py", 12)
    first, second = tmp_path / "0", tmp_path / "1"
    with TraceWriter(first, clock=Clock.VIRTUAL) as writer:
        writer.write(Event(Launch(stream=1, name="k"), site=writer.stack((frame,))))
        writer.continue_in(second)
        sites = [writer.stack((frame,)), writer.stack((frame, frame))]
        for site in sites:
            writer.write(Event(Launch(stream=1, name="k"), site=site))

    with TraceReader(first) as reader, TraceReader(second, previous_reader=reader) as second_reader:
        unread_events(reader)
        events_read = unread_events(second_reader)

        assert [event.body for event in events_read] == [Launch(stream=1, name="k")] * 2
        assert [second_reader.stacks[event.site] for event in events_read] == [
            (frame,),
            (frame, frame),
        ]


def test_memory_mapped_file_is_read_up_to_the_written_end_in_its_header(tmp_path: Path) -> None:
    content = write_trace(tmp_path / "trace", marks(3)).read_bytes()
    path = tmp_path / "mapped"
    path.write_bytes(content[:32] + bytes(1 << 16))
    events_read = []
    with path.open("r+b") as file, TraceReader(path) as reader:
        for begin, end in pairwise((32, len(content) - RECORD_BYTES, len(content))):
            file.seek(begin)
            file.write(content[begin:end])
            file.seek(24)
            file.write(struct.pack("<Q", end))
            file.flush()
            events_read.append(unread_events(reader))

    assert events_read == [marks(2), marks(3)[2:]]


def test_records_of_many_small_blocks_are_joined(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace", clock=Clock.VIRTUAL) as writer:
        for event in marks(100):
            writer.write(event)
            writer.flush()

    with TraceReader(tmp_path / "trace") as reader:
        assert [len(batch) for batch in reader.batches(records=64)] == [64, 36]
