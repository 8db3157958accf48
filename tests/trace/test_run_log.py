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
from cudakit.trace.events import Event, Fill, Gap, Launch
from cudakit.trace.layout import pack
from cudakit.trace.log import Frame
from cudakit.trace.run_log import LogReader, LogWriter, Outcome
from cudakit.trace.spool import Batch

LAST_RELEASE = Path(__file__).parents[1] / "sanitize_corpus/logs"
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


def log(*given: Batch, outcome: Outcome | None = OUTCOME) -> bytes:
    file = BytesIO()
    writer = LogWriter(file)
    for batch in given:
        writer.add(batch)
    if outcome:
        writer.finish(outcome)
    return file.getvalue()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "races.log"


def read(place: Path) -> list[Batch]:
    with LogReader(place) as reader:
        return list(reader.batches())


def test_batches_of_all_traces_are_read_in_order(place: Path) -> None:
    order = [*batches(process=7), *batches(process=8, chain=1, count=1), *batches(process=7)]
    place.write_bytes(log(*order))

    found = read(place)

    assert [(each.process, each.chain, each.simulated) for each in found] == [
        (each.process, each.chain, each.simulated) for each in order
    ]
    for one, other in zip(found, order, strict=True):
        assert one.records.tobytes() == other.records.tobytes()
        assert list(one.strings[: len(other.strings)]) == list(other.strings)
        assert list(one.stacks) == list(other.stacks)


def test_outcome_of_the_run_is_read(place: Path) -> None:
    place.write_bytes(log(*batches()))

    with LogReader(place) as reader:
        fractions = [reader.fraction for _ in reader.batches()]
        assert reader.outcome == OUTCOME
        assert fractions == sorted(fractions)
        assert reader.fraction == 1


def test_log_without_work_has_no_batches(place: Path) -> None:
    place.write_bytes(log())

    assert read(place) == []


def test_large_batch_is_split(place: Path) -> None:
    records = pack([Event(Fill(3, 4096, 1024), seq=1)], {"": 0}.__getitem__)
    place.write_bytes(log(Batch(7, np.repeat(records, 20_000), [""], [()])))

    found = read(place)

    assert len(found) > 1
    assert sum(len(each.records) for each in found) == 20_000
    assert place.stat().st_size < 20_000


def test_memory_to_read_a_log_does_not_grow_with_its_size(place: Path) -> None:
    records = np.repeat(pack([Event(Fill(3, 4096, 1024), seq=1)], {"": 0}.__getitem__), 8192)
    batch = Batch(7, records, [""], [()])
    place.write_bytes(log(*[batch] * 50))
    tracemalloc.start()

    with LogReader(place) as reader:
        count = sum(len(each.records) for each in reader.batches())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert count == 50 * 8192
    assert peak_bytes < 8 * records.nbytes < 50 * records.nbytes


@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 0.5, 0.7, 0.99])
def test_truncated_log_is_damaged(part: float, place: Path) -> None:
    content = log(*batches())
    place.write_bytes(content[: int(len(content) * part)])

    with pytest.raises(InputError, match=r"is truncated|is not a log"):
        read(place)


def test_every_changed_byte_is_detected(place: Path) -> None:
    content = log(*batches(count=1))
    for at in range(len(content)):
        place.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        with pytest.raises(InputError):
            read(place)


def test_log_without_its_end_is_truncated(place: Path) -> None:
    place.write_bytes(log(*batches(), outcome=None))

    with pytest.raises(InputError, match="damaged: it is truncated"):
        read(place)


def test_data_after_the_end_is_damage(place: Path) -> None:
    place.write_bytes(log() + log())

    with pytest.raises(InputError, match="damaged"):
        read(place)


def test_invalid_record_is_damage(place: Path) -> None:
    records = pack([Event(Gap("lost", 1), seq=1)], {"": 0, "lost": 9}.__getitem__)
    place.write_bytes(log(Batch(7, records, [""], [()])))

    with pytest.raises(InputError, match="invalid what in a record of kind GAP"):
        read(place)


@pytest.mark.parametrize(
    "table", [b"[" * 100_000, b"{}", b'{"process": 1e999}', b"\xff", b'{"process": [], "chain": 0}']
)
def test_table_of_another_form_is_damage(table: bytes, place: Path) -> None:
    stored = zlib.compress(table)
    header = struct.pack("<4s4I", b"trce", 0, 1, len(table), len(stored))
    checksum = struct.pack("<I", zlib.crc32(header + stored))
    place.write_bytes(log()[:16] + header + checksum + stored)

    with pytest.raises(InputError, match="a table cannot be read"):
        read(place)


def test_log_of_a_newer_version_names_both_versions(place: Path) -> None:
    content = log()
    place.write_bytes(content[:12] + struct.pack("<I", 99) + content[16:])

    with pytest.raises(InputError, match="version 99; this cudakit reads 1 and 2"):
        read(place)


@pytest.mark.parametrize("content", [b"", b"cudakit\n" + bytes(24), b"PK\x03\x04", b"{}\n" * 99])
def test_foreign_file_is_refused(content: bytes, place: Path) -> None:
    place.write_bytes(content)

    with pytest.raises(InputError, match="is not a log"):
        read(place)


def test_missing_file_is_refused(place: Path) -> None:
    with pytest.raises(InputError, match=r"races\.log cannot be read: No such file"):
        read(place)


# --- logs of the last release


@pytest.mark.parametrize("name", ["cupy_chain_race", "torch_graph_branches_fixed"])
def test_log_of_the_last_release_is_read(name: str) -> None:
    path = LAST_RELEASE / f"{name}.npz"
    with np.load(path) as file:
        (table,) = json.loads(file["tables"].tobytes())["chains"]
        columns = file["records0"]

    (found,) = read(path)

    assert found.records.tobytes() == columns.T.tobytes()
    assert list(found.strings) == table["strings"]
    assert [[list(frame) for frame in stack] for stack in found.stacks] == table["stacks"]


def test_foreign_archive_is_refused(place: Path) -> None:
    with place.open("wb") as file:
        np.savez(file, weights=np.zeros(3))

    with pytest.raises(InputError, match="is not a log of cudakit, or is damaged"):
        read(place)
