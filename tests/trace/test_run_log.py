from __future__ import annotations

import json
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from cudakit.errors import InputError
from cudakit.stacks import Frame
from cudakit.trace.events import Event, Fill, Gap, Launch
from cudakit.trace.run_log import LogReader, LogWriter, Outcome
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import pack

LAST_RELEASE_LOGS = Path(__file__).parents[1] / "sanitize_corpus/logs"
OUTCOME = Outcome(3, True, ("a note",), ("2 events are missing",), None)


def batches(*, count: int = 3, process: int = 7, chain: int = 0) -> Iterator[Batch]:
    """Yield batches of one trace, whose tables grow."""
    numbers, strings, stacks = {"": 0}, [""], [()]
    for seq in range(1, count + 1):
        name = f"kernel{seq}"
        numbers[name] = len(strings)
        strings.append(name)
        stacks.append((Frame("f", "train\udc80.py", seq),))
        events = [
            Event(Launch(3, name), seq=seq, site=seq),
            Event(Fill(3, 4096, 1024), seq=seq),
        ]
        records = pack(events, numbers.__getitem__)
        yield Batch(process, records, strings, stacks, chain, simulated=bool(chain))


def log_content(*written_batches: Batch, outcome: Outcome | None = OUTCOME) -> bytes:
    file = BytesIO()
    writer = LogWriter(file)
    for batch in written_batches:
        writer.add(batch)
    if outcome:
        writer.finish(outcome)
    return file.getvalue()


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "races.log"


def read(log_path: Path) -> list[Batch]:
    with LogReader(log_path) as reader:
        return list(reader.batches())


def test_batches_of_all_traces_are_read_in_order(log_path: Path) -> None:
    written_batches = [
        *batches(process=7),
        *batches(process=8, chain=1, count=1),
        *batches(process=7),
    ]
    log_path.write_bytes(log_content(*written_batches))

    batches_read = read(log_path)

    assert [(batch.process, batch.trace_number, batch.simulated) for batch in batches_read] == [
        (batch.process, batch.trace_number, batch.simulated) for batch in written_batches
    ]
    for batch_read, written_batch in zip(batches_read, written_batches, strict=True):
        assert batch_read.records.tobytes() == written_batch.records.tobytes()
        assert list(batch_read.strings[: len(written_batch.strings)]) == list(written_batch.strings)
        assert list(batch_read.stacks) == list(written_batch.stacks)


def test_outcome_of_the_run_is_read(log_path: Path) -> None:
    log_path.write_bytes(log_content(*batches()))

    with LogReader(log_path) as reader:
        fractions = [reader.fraction for _ in reader.batches()]
        assert reader.outcome == OUTCOME
        assert fractions == sorted(fractions)
        assert reader.fraction == 1


def test_log_without_work_has_no_batches(log_path: Path) -> None:
    log_path.write_bytes(log_content())

    assert read(log_path) == []


def test_large_batch_is_split(log_path: Path) -> None:
    records = pack([Event(Fill(3, 4096, 1024), seq=1)], {"": 0}.__getitem__)
    log_path.write_bytes(log_content(Batch(7, np.repeat(records, 20_000), [""], [()])))

    batches_read = read(log_path)

    assert len(batches_read) > 1
    assert sum(len(batch.records) for batch in batches_read) == 20_000
    assert log_path.stat().st_size < 20_000


def test_memory_to_read_a_log_does_not_grow_with_its_size(log_path: Path) -> None:
    records = np.repeat(pack([Event(Fill(3, 4096, 1024), seq=1)], {"": 0}.__getitem__), 8192)
    batch = Batch(7, records, [""], [()])
    log_path.write_bytes(log_content(*[batch] * 50))
    tracemalloc.start()

    with LogReader(log_path) as reader:
        count = sum(len(batch.records) for batch in reader.batches())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert count == 50 * 8192
    assert peak_bytes < 8 * records.nbytes < 50 * records.nbytes


@pytest.mark.parametrize("fraction_left", [0.0, 0.1, 0.3, 0.5, 0.7, 0.99])
def test_truncated_log_is_damaged(fraction_left: float, log_path: Path) -> None:
    content = log_content(*batches())
    log_path.write_bytes(content[: int(len(content) * fraction_left)])

    with pytest.raises(InputError, match=r"is truncated|is not a log|is empty"):
        read(log_path)


def test_every_changed_byte_is_detected(log_path: Path) -> None:
    content = log_content(*batches(count=1))
    for offset in range(len(content)):
        log_path.write_bytes(
            content[:offset] + bytes([content[offset] ^ 0x55]) + content[offset + 1 :]
        )
        with pytest.raises(InputError):
            read(log_path)


def test_log_without_its_end_is_truncated(log_path: Path) -> None:
    log_path.write_bytes(log_content(*batches(), outcome=None))

    with pytest.raises(InputError, match="damaged: the file is truncated"):
        read(log_path)


def test_data_after_the_end_is_damage(log_path: Path) -> None:
    log_path.write_bytes(log_content() + log_content())

    with pytest.raises(InputError, match="damaged"):
        read(log_path)


def test_invalid_record_is_damage(log_path: Path) -> None:
    records = pack([Event(Gap("lost", 1), seq=1)], {"": 0, "lost": 9}.__getitem__)
    log_path.write_bytes(log_content(Batch(7, records, [""], [()])))

    with pytest.raises(InputError, match="invalid reason in a record of kind GAP"):
        read(log_path)


@pytest.mark.parametrize(
    "trace_table",
    [b"[" * 100_000, b"{}", b'{"process": 1e999}', b"\xff", b'{"process": [], "chain": 0}'],
)
def test_table_of_another_form_is_damage(trace_table: bytes, log_path: Path) -> None:
    compressed = zlib.compress(trace_table)
    header = struct.pack("<4s4I", b"trce", 0, 1, len(trace_table), len(compressed))
    checksum = struct.pack("<I", zlib.crc32(header + compressed))
    log_path.write_bytes(log_content()[:16] + header + checksum + compressed)

    with pytest.raises(InputError, match="a table cannot be read"):
        read(log_path)


def test_log_of_a_newer_version_names_both_versions(log_path: Path) -> None:
    content = log_content()
    log_path.write_bytes(content[:12] + struct.pack("<I", 99) + content[16:])

    with pytest.raises(InputError, match="version 99; this cudakit reads 1 and 2"):
        read(log_path)


@pytest.mark.parametrize("content", [b"", b"cudakit\n" + bytes(24), b"PK\x03\x04", b"{}\n" * 99])
def test_foreign_file_is_refused(content: bytes, log_path: Path) -> None:
    log_path.write_bytes(content)

    with pytest.raises(InputError, match=r"is not a log|is empty"):
        read(log_path)


def test_missing_file_is_refused(log_path: Path) -> None:
    with pytest.raises(InputError, match=r"races\.log does not exist"):
        read(log_path)


# --- logs of the last release


@pytest.mark.parametrize("name", ["cupy_chain_race", "torch_graph_branches_fixed"])
def test_log_of_the_last_release_is_read(name: str) -> None:
    path = LAST_RELEASE_LOGS / f"{name}.npz"
    with np.load(path) as file:
        (tables,) = json.loads(file["tables"].tobytes())["chains"]
        columns = file["records0"]

    (batch,) = read(path)

    assert batch.records.tobytes() == columns.T.tobytes()
    assert list(batch.strings) == tables["strings"]
    assert [
        [[frame.name, frame.filename, frame.line] for frame in stack] for stack in batch.stacks
    ] == tables["stacks"]


def test_foreign_archive_is_refused(log_path: Path) -> None:
    with log_path.open("wb") as file:
        np.savez(file, weights=np.zeros(3))

    with pytest.raises(InputError, match="is not a log of cudakit run --sanitize, or is damaged"):
        read(log_path)
