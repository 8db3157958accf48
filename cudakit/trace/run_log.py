"""Write and read logs: one file with the traces of all processes of a run, for ``cudakit sanitize``.

The records are in the order in which the run analyzed them. The file begins with 16 bytes: ``cudakit log\\n``
and the version of the format. Blocks follow, each after a header of 24 bytes: a tag of four letters, the
number of the trace, the number of items, the size of the content in bytes, the size of the compressed
content, and the CRC-32 of these 20 bytes and of the compressed content. All numbers are little-endian. Every
content is compressed with zlib.

* ``trce``: JSON that describes the next trace: the PID of its process, its number within the process, and
  whether the device was simulated. Traces are numbered from 0.
* ``text``: JSON, a list of strings that continue the string table of the trace.
* ``stak``: JSON, a list of call stacks that continue the stack table of the trace.
* ``rcds``: records (``layout.RECORD``), transposed: the first byte of every record, then the second byte of
  every record, and so on. Similar bytes next to each other compress well.
* ``done``: JSON, the ``Outcome``. A complete file ends with this block.

The last release wrote version 1: a .npz file with the records of each trace in one array.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np

from cudakit.errors import InputError
from cudakit.input_files import (
    LOG_MAGIC,
    START_BYTES,
    ExpectedFile,
    empty_file_error,
    read_error,
    wrong_file_error,
)
from cudakit.stacks import Frame, Stack
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import RECORD, RECORD_BYTES, Records, find_invalid

VERSION: Final = 2
# Start of the reason for an unsuccessful run with ``--require-gpu``. No event is missing from such a result.
NO_REAL_GPU_WORK: Final = "no work of a real GPU was recorded (--require-gpu)"
SANITIZE_LOG: Final = ExpectedFile(
    "a log of cudakit run --sanitize",
    "write a log with: cudakit run --sanitize --log races.log PROGRAM",
)

_HEADER = struct.Struct("<12sI")
_BLOCK = struct.Struct("<4s4I")
_CHECKSUM = struct.Struct("<I")
_DAMAGE_HINT = "copy the file again, or repeat the run"
_ZIP_MAGIC = b"PK\x03\x04"
_ITEMS_PER_BLOCK = 8192
# Limit of a block's size: a larger size is damage, or an attempt to exhaust the memory.
_MAX_BLOCK_BYTES = 1 << 28
# Errors that unexpected JSON causes; deeply nested JSON causes RecursionError.
_JSON_ERRORS = (ValueError, TypeError, LookupError, OverflowError, RecursionError, EOFError)
_WORD_BYTES = 8
_RECORD_WORDS = RECORD_BYTES // _WORD_BYTES
_Columns: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
# Level of zlib. Higher levels are several times slower than the analysis of the records, and save little.
_COMPRESSION_LEVEL = 1


def reasons_for_missing_events(incomplete: Sequence[str]) -> list[str]:
    """Return the reasons of ``incomplete`` for which a result may lack events."""
    return [reason for reason in incomplete if not reason.startswith(NO_REAL_GPU_WORK)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a recorded run. ``SanitizeResult`` has the same fields and describes them."""

    exit_status: int | None = None
    stopped: bool = False
    notes: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    no_gpu_work: str | None = None


# --- writing


class LogWriter:
    """Writes a log to a new binary file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._traces: dict[tuple[int, int], _WrittenTrace] = {}
        file.write(_HEADER.pack(LOG_MAGIC, VERSION))

    def add(self, batch: Batch) -> None:
        """Append a batch, and the strings and stacks that its trace got since the trace's last batch."""
        trace = self._trace(batch)
        self._write_table(b"text", trace.index_in_log, batch.strings[trace.string_count :])
        new_stacks = [
            [(frame.name, frame.filename, frame.line) for frame in stack]
            for stack in batch.stacks[trace.stack_count :]
        ]
        self._write_table(b"stak", trace.index_in_log, new_stacks)
        trace.string_count, trace.stack_count = len(batch.strings), len(batch.stacks)
        for begin in range(0, len(batch.records), _ITEMS_PER_BLOCK):
            records = np.ascontiguousarray(batch.records[begin : begin + _ITEMS_PER_BLOCK])
            self._write_block(
                b"rcds", trace.index_in_log, len(records), _transpose_records(records).tobytes()
            )

    def finish(self, outcome: Outcome) -> None:
        """Write the last block of the log."""
        self._write_json(b"done", 0, asdict(outcome))

    def _trace(self, batch: Batch) -> _WrittenTrace:
        """Return the trace of a batch; write its description before its first batch."""
        trace_key = batch.process, batch.trace_number
        if trace_key not in self._traces:
            trace_index = len(self._traces)
            self._traces[trace_key] = _WrittenTrace(trace_index)
            description = {
                "process": batch.process,
                "chain": batch.trace_number,
                "simulated": batch.simulated,
            }
            self._write_json(b"trce", trace_index, description)
        return self._traces[trace_key]

    def _write_table(self, tag: bytes, trace_index: int, table_items: Sequence[object]) -> None:
        for begin in range(0, len(table_items), _ITEMS_PER_BLOCK):
            block_items = table_items[begin : begin + _ITEMS_PER_BLOCK]
            self._write_json(tag, trace_index, block_items, item_count=len(block_items))

    def _write_json(
        self, tag: bytes, trace_index: int, content: object, *, item_count: int = 1
    ) -> None:
        self._write_block(
            tag, trace_index, item_count, json.dumps(content, separators=(",", ":")).encode()
        )

    def _write_block(self, tag: bytes, trace_index: int, item_count: int, content: bytes) -> None:
        compressed_content = zlib.compress(content, _COMPRESSION_LEVEL)
        header = _BLOCK.pack(tag, trace_index, item_count, len(content), len(compressed_content))
        checksum = zlib.crc32(compressed_content, zlib.crc32(header))
        self._file.write(header + _CHECKSUM.pack(checksum) + compressed_content)


@dataclass(slots=True)
class _WrittenTrace:
    """The index of a trace in the log, and the lengths of its tables written so far.

    Both lengths start at 1: index 0 is the empty string or stack in every trace, and is not written.
    """

    index_in_log: int
    string_count: int = 1
    stack_count: int = 1


# --- reading


class TruncatedLogError(InputError):
    """A log ends before its last block. The batches before its end are valid.

    ``sentence`` says where the log ends; it is empty if no batch precedes the end.
    """

    def __init__(self, message: str, *, hint: str, sentence: str) -> None:
        super().__init__(message, hint=hint)
        self.sentence = sentence


class LogReader:
    """Reads a log block by block. Raises InputError if the file is missing, damaged or not a log.

    Raises TruncatedLogError after the last batch of a truncated log. ``expected_file`` describes the file in
    errors.
    """

    def __init__(self, path: Path, expected_file: ExpectedFile = SANITIZE_LOG) -> None:
        self.outcome = Outcome()  # outcome of the run; valid after all batches were read
        self.path = path
        self._expected_file = expected_file
        self._traces: list[_ReadTrace] = []
        self._last_batch: Batch | None = None
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise read_error(path, error) from error
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def fraction(self) -> float:
        """The fraction of the file that was read, from 0 to 1."""
        return self._file.tell() / max(self._size_bytes, 1)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches in the order in which they were written."""
        return self._read_version_1() if self._is_version_1 else self._read_blocks()

    def _read_header(self) -> None:
        self._size_bytes = os.fstat(self._file.fileno()).st_size
        header = self._file.read(_HEADER.size)
        self._is_version_1 = header.startswith(_ZIP_MAGIC)
        if self._is_version_1:
            return
        if header.startswith(LOG_MAGIC) and len(header) < _HEADER.size:
            raise self._truncation_error()
        if not header.startswith(LOG_MAGIC):
            if not header:
                raise empty_file_error(self.path, self._expected_file)
            first_bytes = header + self._file.read(START_BYTES - len(header))
            raise wrong_file_error(self.path, first_bytes, self._expected_file)
        _, version = _HEADER.unpack(header)
        if version != VERSION:
            raise InputError(
                f"{self.path} is a log of version {version}; this cudakit reads 1 and {VERSION}",
                hint="read it with the cudakit that wrote it",
            )

    def _read_blocks(self) -> Iterator[Batch]:
        """Read the blocks of the current format, and yield a batch for each block of records."""
        has_outcome = False
        while header := self._file.read(_BLOCK.size):
            if has_outcome:
                raise self._damage_error("data after its end")
            if len(header) < _BLOCK.size:
                raise self._truncation_error()
            tag, trace_index, item_count, size_bytes, compressed_bytes = _BLOCK.unpack(header)
            block_content = self._read_content(header, size_bytes, compressed_bytes)
            if tag == b"rcds":
                is_valid = len(block_content) == item_count * RECORD_BYTES
                if not is_valid or trace_index >= len(self._traces):
                    raise self._damage_error("a block of records is not valid")
                columns = np.frombuffer(block_content, np.uint8).reshape(RECORD_BYTES, item_count)
                self._last_batch = self._transposed_batch(self._traces[trace_index], columns)
                yield self._last_batch
            else:
                self._decode_json(tag, trace_index, item_count, block_content)
            has_outcome = tag == b"done"
        if not has_outcome:
            raise self._truncation_error()

    def _read_content(self, header: bytes, size_bytes: int, compressed_bytes: int) -> bytes:
        """Read the checksum and the content of a block; return the decompressed content."""
        if max(size_bytes, compressed_bytes) > _MAX_BLOCK_BYTES:
            raise self._damage_error("a block is too large")
        checksum = self._file.read(_CHECKSUM.size)
        compressed_content = self._file.read(compressed_bytes)
        if len(checksum) < _CHECKSUM.size or len(compressed_content) < compressed_bytes:
            raise self._truncation_error()
        if checksum != _CHECKSUM.pack(zlib.crc32(compressed_content, zlib.crc32(header))):
            raise self._damage_error("a checksum is wrong")
        try:
            # The limit is one byte above the expected size, so that a longer content is detected without
            # decompressing all of it.
            content = zlib.decompressobj().decompress(compressed_content, size_bytes + 1)
        except zlib.error as error:
            raise self._damage_error("a block cannot be decompressed") from error
        if len(content) != size_bytes:
            raise self._damage_error("a block has a wrong size")
        return content

    def _decode_json(self, tag: bytes, trace_index: int, item_count: int, content: bytes) -> None:
        """Apply a JSON block: a new trace, items of a table, or the outcome."""
        try:
            json_value = json.loads(content)
            if tag == b"trce" and trace_index == len(self._traces):
                self._traces.append(_ReadTrace(**json_value))
            elif tag == b"text":
                self._traces[trace_index].add_strings(json_value, item_count)
            elif tag == b"stak":
                self._traces[trace_index].add_stacks(json_value, item_count)
            elif tag == b"done":
                self.outcome = _outcome(**json_value)
            else:
                raise ValueError(f"block {tag!r}")
        except _JSON_ERRORS as error:
            raise self._damage_error("a table cannot be read") from error

    def _read_version_1(self) -> Iterator[Batch]:
        """Read a .npz file trace by trace."""
        self._file.seek(0)
        try:
            with np.load(self._file) as file:
                header = json.loads(file["tables"].tobytes())
                if header["version"] != 1:
                    raise InputError(
                        f"{self.path} is a log of an unknown version",
                        hint="read it with the cudakit that wrote it",
                    )
                for trace_index, trace_tables in enumerate(header["chains"]):
                    trace = _ReadTrace(trace_index + 1, 0, trace_tables["simulated"], [], [])
                    trace.add_strings(trace_tables["strings"], len(trace_tables["strings"]))
                    trace.add_stacks(trace_tables["stacks"], len(trace_tables["stacks"]))
                    record_columns = file[f"records{trace_index}"]
                    for begin in range(0, record_columns.shape[1], _ITEMS_PER_BLOCK):
                        batch_columns = record_columns[:, begin : begin + _ITEMS_PER_BLOCK]
                        yield self._transposed_batch(trace, batch_columns)
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, *_JSON_ERRORS) as error:
            raise InputError(
                f"{self.path} is not {self._expected_file.noun}, or is damaged",
                hint=self._expected_file.hint,
            ) from error
        self._file.seek(0, os.SEEK_END)

    def _transposed_batch(self, trace: _ReadTrace, columns: _Columns) -> Batch:
        """Return the batch of records that are stored transposed. Raises InputError if they are invalid."""
        records = _records_of_columns(columns)
        if reason := find_invalid(records, len(trace.strings)):
            raise self._damage_error(reason)
        return Batch(
            trace.process, records, trace.strings, trace.stacks, trace.chain, trace.simulated
        )

    def _damage_error(self, reason: str) -> InputError:
        return InputError(f"{self.path} is damaged: {reason}", hint=_DAMAGE_HINT)

    def _truncation_error(self) -> TruncatedLogError:
        sentence = ""
        if batch := self._last_batch:
            sentence = (
                f"the log is truncated: it ends at byte {self._size_bytes:,}, after CUDA call"
                f" {batch.records['seq'].max():,} of process {batch.process}; what follows is unknown"
            )
        return TruncatedLogError(
            f"{self.path} is damaged: the file is truncated", hint=_DAMAGE_HINT, sentence=sentence
        )


class _ReadTrace:
    """A trace of the log, with the string and stack tables of the blocks read so far."""

    def __init__(
        self,
        process: int,
        chain: int,
        simulated: bool,
        strings: Sequence[str] = ("",),
        stacks: Sequence[Stack] = ((),),
    ) -> None:
        self.process = int(process)
        self.chain = int(chain)
        self.simulated = bool(simulated)
        self.strings = list(strings)
        self.stacks = list(stacks)

    def add_strings(self, strings: Sequence[str], stored_count: int) -> None:
        self.strings += map(str, strings)
        _check_count(strings, stored_count)

    def add_stacks(
        self, stacks: Sequence[Sequence[tuple[str, str, int]]], stored_count: int
    ) -> None:
        self.stacks += [
            tuple(Frame(str(function), str(file), int(line)) for function, file, line in stack)
            for stack in stacks
        ]
        _check_count(stacks, stored_count)


def _transpose_records(records: Records) -> _Columns:
    """Return the bytes of records, transposed: a row for each byte of a record."""
    columns = np.empty((RECORD_BYTES, len(records)), np.uint8)
    record_words = records.view(np.uint64).reshape(len(records), _RECORD_WORDS)
    for index in range(_RECORD_WORDS):
        word_bytes = (
            np.ascontiguousarray(record_words[:, index]).view(np.uint8).reshape(-1, _WORD_BYTES)
        )
        for byte in range(_WORD_BYTES):
            columns[index * _WORD_BYTES + byte] = word_bytes[:, byte]
    return columns


def _records_of_columns(columns: _Columns) -> Records:
    """Return records from columns of their bytes.

    Transposes words of 8 bytes, because numpy transposes single bytes six times as slowly.
    """
    record_words = np.empty((columns.shape[1], _RECORD_WORDS), np.uint64)
    word_bytes = np.empty((columns.shape[1], _WORD_BYTES), np.uint8)
    for index in range(_RECORD_WORDS):
        for byte in range(_WORD_BYTES):
            word_bytes[:, byte] = columns[index * _WORD_BYTES + byte]
        record_words[:, index] = word_bytes.view(np.uint64)[:, 0]
    return record_words.reshape(-1).view(RECORD)


def _check_count(table_items: Sequence[object], expected_count: int) -> None:
    if len(table_items) != expected_count:
        raise ValueError(f"{len(table_items)} items instead of {expected_count}")


def _outcome(
    exit_status: int | None,
    stopped: bool,
    notes: Sequence[str],
    incomplete: Sequence[str],
    no_gpu_work: str | None,
) -> Outcome:
    return Outcome(
        None if exit_status is None else int(exit_status),
        bool(stopped),
        tuple(map(str, notes)),
        tuple(map(str, incomplete)),
        None if no_gpu_work is None else str(no_gpu_work),
    )
