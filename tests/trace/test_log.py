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
from cudakit.trace.events import Event, Launch, Mark
from cudakit.trace.layout import RECORD_BYTES, unpack
from cudakit.trace.log import Clock, Frame, Reader, Stack, Writer

# The directory is the same for all examples of a test; each example has a file of its own.
SAME_DIRECTORY = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50
)


def written(path: Path, trace: Sequence[Event], stacks: Sequence[Stack] = ()) -> Path:
    path.unlink(missing_ok=True)
    with Writer(path, clock=Clock.VIRTUAL) as writer:
        for stack in stacks:
            writer.stack(stack)
        for event in trace:
            writer.write(event)
    return path


def read(path: Path) -> list[Event]:
    with Reader(path) as reader:
        return everything(reader)


def everything(reader: Reader) -> list[Event]:
    return [event for batch in reader.batches() for event in unpack(batch, reader.strings)]


def marks(count: int) -> list[Event]:
    return [Event(Mark(name=f"mark {index}"), seq=index) for index in range(count)]


@SAME_DIRECTORY
@given(trace=st.lists(events(), max_size=8))
def test_reader_returns_the_written_events(tmp_path: Path, trace: list[Event]) -> None:
    assert read(written(tmp_path / "log", trace)) == trace


def test_records_are_returned_in_batches(tmp_path: Path) -> None:
    trace = marks(2000)
    with Reader(written(tmp_path / "log", trace)) as reader:
        batches = list(reader.batches(records=300))

        assert max(map(len, batches)) <= 300
        assert [event for batch in batches for event in unpack(batch, reader.strings)] == trace


@SAME_DIRECTORY
@given(data=st.data())
def test_truncated_file_is_read_up_to_the_end(tmp_path: Path, data: st.DataObject) -> None:
    trace = marks(600)
    path = written(tmp_path / "log", trace)
    content = path.read_bytes()
    cut = data.draw(st.integers(32, len(content)))
    path.write_bytes(content[:cut])

    found = read(path)

    assert found == trace[: len(found)]
    # Only the tables before the block and the truncated record may be lost.
    whole = content[:cut].count(b"rcds")
    assert len(found) >= 512 * max(whole - 1, 0)


def test_only_the_truncated_record_of_a_block_is_lost(tmp_path: Path) -> None:
    path = written(tmp_path / "log", marks(10))
    path.write_bytes(path.read_bytes()[: -RECORD_BYTES - 1])

    assert read(path) == marks(8)


def test_growing_file_is_read_further(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Writer(path, clock=Clock.MONOTONIC) as writer, Reader(path) as reader:
        assert everything(reader) == []
        for event in marks(3):
            writer.write(event)
            writer.flush()
            assert everything(reader) == [event]
        assert everything(reader) == []


def test_incomplete_block_is_read_once_complete(tmp_path: Path) -> None:
    content = written(tmp_path / "log", marks(100)).read_bytes()
    growing = tmp_path / "growing"
    growing.write_bytes(content[:40])
    found = []
    with Reader(growing) as reader, growing.open("ab") as file:
        for begin in range(40, len(content), 777):
            file.write(content[begin : begin + 777])
            file.flush()
            found += everything(reader)

    assert found == marks(100)


def test_stacks_are_stored_once_and_numbered_from_one(tmp_path: Path) -> None:
    inner, outer = Frame("step", "train.py", 12), Frame("<module>", "train.py", 30)
    path = tmp_path / "log"
    with Writer(path, clock=Clock.VIRTUAL) as writer:
        sites = [writer.stack(stack) for stack in ((inner, outer), (outer,), (inner, outer), ())]
        writer.write(Event(Launch(stream=1, name="k"), site=sites[0]))

    with Reader(path) as reader:
        (event,) = everything(reader)

        assert sites == [1, 2, 1, 0]
        assert reader.stacks == [(), (inner, outer), (outer,)]
        assert reader.stacks[event.site][0] == inner


def test_header_names_the_clock(tmp_path: Path) -> None:
    with Reader(written(tmp_path / "log", [])) as reader:
        assert reader.clock is Clock.VIRTUAL


def test_names_that_are_not_utf8_survive(tmp_path: Path) -> None:
    trace = [Event(Mark(name=b"caf\xe9".decode("utf-8", "surrogateescape")))]

    assert read(written(tmp_path / "log", trace)) == trace


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = written(tmp_path / "log", marks(1))

    with pytest.raises(FileExistsError):
        Writer(path, clock=Clock.VIRTUAL)


@pytest.mark.parametrize(
    "content", [b"", b"cudakit\n", b"PK" + bytes(60)], ids=["empty", "cut", "zip"]
)
def test_file_that_is_not_a_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)

    with pytest.raises(InputError, match="is not a trace"):
        Reader(path)


def test_trace_of_another_version_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "log", [])
    content = bytearray(path.read_bytes())
    content[8] = 99
    path.write_bytes(content)

    with pytest.raises(InputError, match="version 99"):
        Reader(path)


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
    path = written(tmp_path / "log", [])
    path.write_bytes(path.read_bytes() + block)

    with pytest.raises(InputError, match="is damaged"):
        read(path)


def test_trace_continues_in_another_file_with_the_same_numbers(tmp_path: Path) -> None:
    frame = Frame("step", "train.py", 12)
    first, second = tmp_path / "0", tmp_path / "1"
    with Writer(first, clock=Clock.VIRTUAL) as writer:
        writer.write(Event(Launch(stream=1, name="k"), site=writer.stack((frame,))))
        writer.continue_in(second)
        sites = [writer.stack((frame,)), writer.stack((frame, frame))]
        for site in sites:
            writer.write(Event(Launch(stream=1, name="k"), site=site))

    with Reader(first) as reader, Reader(second, after=reader) as further:
        everything(reader)
        found = everything(further)

        assert [event.fact for event in found] == [Launch(stream=1, name="k")] * 2
        assert [further.stacks[event.site] for event in found] == [(frame,), (frame, frame)]


def test_mapped_file_is_read_up_to_the_end_in_its_header(tmp_path: Path) -> None:
    content = written(tmp_path / "log", marks(3)).read_bytes()
    path = tmp_path / "mapped"
    path.write_bytes(content[:32] + bytes(1 << 16))
    found = []
    with path.open("r+b") as file, Reader(path) as reader:
        for begin, end in pairwise((32, len(content) - RECORD_BYTES, len(content))):
            file.seek(begin)
            file.write(content[begin:end])
            file.seek(24)
            file.write(struct.pack("<Q", end))
            file.flush()
            found.append(everything(reader))

    assert found == [marks(2), marks(3)[2:]]


def test_records_of_many_small_blocks_are_joined(tmp_path: Path) -> None:
    with Writer(tmp_path / "log", clock=Clock.VIRTUAL) as writer:
        for event in marks(100):
            writer.write(event)
            writer.flush()

    with Reader(tmp_path / "log") as reader:
        assert [len(batch) for batch in reader.batches(records=64)] == [64, 36]
