"""The analysis of a truncated log reports everything before its end, and where the log ends."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import race_logs

from cudakit.errors import InputError
from cudakit.sanitize.detector import RaceDetector, analyze_log
from cudakit.sanitize.findings import RaceCollector
from cudakit.sanitize.races import SanitizeResult
from cudakit.trace.run_log import LogReader, LogWriter, Outcome
from cudakit.trace.spool import Batch

LOGS = Path(__file__).parents[1] / "sanitize_corpus/logs"
FILE_HEADER_BYTES, BLOCK_HEADER = 16, struct.Struct("<4s5I")


def log_content(batches: list[Batch]) -> bytes:
    file = BytesIO()
    writer = LogWriter(file)
    for batch in batches:
        writer.add(batch)
    writer.finish(Outcome(exit_status=0))
    return file.getvalue()


def small_batches(name: str) -> list[Batch]:
    """Return the events of a recorded program, 10 at a time."""
    return [
        replace(trace, records=trace.records[begin : begin + 10])
        for trace in race_logs.load(LOGS / f"{name}.npz")
        for begin in range(0, len(trace.records), 10)
    ]


def blocks(content: bytes) -> Iterator[tuple[int, int, bool]]:
    """Yield begin and end of each block of a log, and whether it has records."""
    begin = FILE_HEADER_BYTES
    while begin < len(content):
        tag, _, _, _, compressed_bytes, _ = BLOCK_HEADER.unpack_from(content, begin)
        end = begin + BLOCK_HEADER.size + compressed_bytes
        yield begin, end, tag == b"rcds"
        begin = end


def analyzed(path: Path, content: bytes) -> SanitizeResult:
    path.write_bytes(content)
    with LogReader(path) as log:
        return analyze_log(log, RaceCollector())


def expected(batches: list[Batch]) -> SanitizeResult:
    detector, report = RaceDetector(), RaceCollector()
    for batch in batches:
        detector.feed(batch, report)
    detector.finish(report)
    return detector.result(report)


@pytest.mark.parametrize(
    "name", ["cupy_halves_race", "torch_graph_branches_race", "cuda_python_graph_update_race"]
)
def test_truncated_log_has_the_findings_of_the_events_before_its_end(
    name: str, tmp_path: Path
) -> None:
    batches, path = small_batches(name), tmp_path / "races.log"
    content = log_content(batches)
    complete = analyzed(path, content)
    assert complete.races
    assert complete.incomplete == ()
    read_count = 0  # number of batches in the complete blocks
    race_counts = set()  # of the truncated logs
    for begin, end, has_records in blocks(content):
        result = expected(batches[:read_count])
        last_call = batches[read_count - 1].records["seq"].max() if read_count else 0
        # Between blocks, in the header of a block, in its checksum, and in its compressed content
        for size in (begin, begin + 7, begin + 22, (begin + BLOCK_HEADER.size + end) // 2, end - 1):
            if not read_count:
                with pytest.raises(InputError, match="damaged: the file is truncated"):
                    analyzed(path, content[:size])
                continue
            truncated = analyzed(path, content[:size])
            assert replace(truncated, incomplete=()) == result
            race_counts.add(len(truncated.races))
            assert truncated.incomplete == (
                f"the log is truncated: it ends at byte {size:,}, after CUDA call {last_call:,} of"
                f" process {batches[0].process}; what follows is unknown",
            )
        read_count += has_records
    assert read_count == len(batches) > 1
    assert race_counts == {0, len(complete.races)}


@pytest.mark.parametrize(
    ("size", "message"), [(1, "is not a log"), (12, "is truncated"), (15, "is truncated")]
)
def test_log_that_ends_in_its_header_is_refused(size: int, message: str, tmp_path: Path) -> None:
    content = log_content(small_batches("cupy_halves_race"))
    with pytest.raises(InputError, match=message):
        analyzed(tmp_path / "races.log", content[:size])
