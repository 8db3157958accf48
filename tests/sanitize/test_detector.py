"""The races of several processes and traces, and of logs that are truncated."""

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
from cudakit.sanitize.findings import RaceCollector, findings, message
from cudakit.sanitize.races import Confidence, SanitizeResult
from cudakit.stacks import Frame
from cudakit.trace.events import Access, Accessed, Event, EventBody, Fill, Launch, StreamCreate
from cudakit.trace.kinds import AccessMode, Precision, StreamFlag
from cudakit.trace.run_log import LogReader, LogWriter, Outcome
from cudakit.trace.spool import Batch, Spool, SpoolWriter
from cudakit.trace.trace_file import Clock

FIRST_FILL = (
    StreamCreate(3, StreamFlag.NON_BLOCKING),
    StreamCreate(4, StreamFlag.NON_BLOCKING),
    Fill(3, 4096, 1024),
)
SECOND_FILL = (Fill(4, 4096, 1024),)


def batch(
    directory: Path, *bodies: EventBody, file_name: str = "train.py", clock: Clock = Clock.VIRTUAL
) -> Batch:
    """Return a batch of this process; the call site of the n-th event is line n of a file."""
    directory.mkdir()
    writer = SpoolWriter(directory, clock=clock)
    for line, body in enumerate(bodies, start=1):
        site = writer.stack((Frame("step", f"/home/user/{file_name}", line),))
        writer.write(Event(body, seq=line, context=1, site=site))
    writer.close()
    with Spool(directory) as spool:
        (batch_read,) = spool.batches()
    return batch_read


def test_traces_of_one_process_are_unrelated(tmp_path: Path) -> None:
    detector, report = RaceDetector(), RaceCollector()
    first, second = (
        batch(tmp_path / "a", *FIRST_FILL),
        batch(tmp_path / "b", *FIRST_FILL[:2], *SECOND_FILL),
    )

    assert detector.feed(first, report) == []
    assert detector.feed(replace(second, trace_number=1), report) == []
    assert detector.feed(replace(second, process=1), report) == []
    assert len(detector.feed(second, report)) == 1


def test_stacks_with_the_same_number_in_two_traces_differ(tmp_path: Path) -> None:
    detector, report = RaceDetector(), RaceCollector()
    first = batch(tmp_path / "a", *FIRST_FILL, *SECOND_FILL, file_name="train.py")
    second = batch(tmp_path / "b", *FIRST_FILL, *SECOND_FILL, file_name="test.py")

    assert detector.feed(first, report)
    assert detector.feed(replace(second, trace_number=1), report)
    files = {race.current.stack[0].filename for race in detector.result(report).races}
    assert files == {"/home/user/train.py", "/home/user/test.py"}


def test_coverage_sums_all_traces_of_a_process(tmp_path: Path) -> None:
    detector, report = RaceDetector(), RaceCollector()
    batch_read = batch(tmp_path / "a", *FIRST_FILL)
    for each_batch in (
        batch_read,
        replace(batch_read, trace_number=1),
        replace(batch_read, process=batch_read.process + 1),
    ):
        detector.feed(each_batch, report)

    result = detector.result(report, exit_status=3)
    assert (result.coverage.fills, len(result.processes), result.exit_status) == (3, 2, 3)


def test_result_is_simulated_only_with_a_virtual_clock(tmp_path: Path) -> None:
    for clock in Clock:
        detector, report = RaceDetector(), RaceCollector()
        detector.feed(batch(tmp_path / clock.name, *FIRST_FILL, clock=clock), report)
        assert detector.result(report).simulated is (clock is Clock.VIRTUAL)


def test_race_is_added_to_the_current_report(tmp_path: Path) -> None:
    detector, first_report, second_report = RaceDetector(), RaceCollector(), RaceCollector()
    detector.feed(batch(tmp_path / "a", *FIRST_FILL), first_report)
    detector.feed(batch(tmp_path / "b", *SECOND_FILL), second_report)

    assert [len(detector.result(report).races) for report in (first_report, second_report)] == [
        0,
        1,
    ]


def test_possible_race_is_no_finding(tmp_path: Path) -> None:
    launches = [
        body
        for stream in (3, 4)
        for body in (
            Launch(stream, "add"),
            Access(4096, 8192, AccessMode.READ | AccessMode.WRITE, Precision.ASSUMED),
        )
    ]
    detector = RaceDetector(report_possible=True)
    report = RaceCollector(min_confidence=Confidence.POSSIBLE)
    batch_read = batch(tmp_path / "a", *FIRST_FILL[:2], *launches)
    records = batch_read.records.copy()
    records["seq"] = [1, 2, 3, 3, 5, 5]  # an access belongs to the launch before it
    batch_read = replace(batch_read, records=records)

    assert detector.feed(batch_read, report) == []
    result = detector.result(report)
    assert [race.confidence for race in result.races] == [Confidence.POSSIBLE]
    assert findings(result) == ()


def test_message_contains_call_sites_and_the_fix(tmp_path: Path) -> None:
    detector, report = RaceDetector(), RaceCollector()
    detector.feed(batch(tmp_path / "a", *FIRST_FILL, *SECOND_FILL), report)

    assert message(findings(detector.result(report))) == (
        "1 race between operations on the GPU\n"
        "\n"
        "write-after-write (certain): the memset on stream 4 writes 1.00 KiB"
        " that the memset on stream 3 may still be writing\n"
        "  later:   memset on stream 4 (non-blocking)\n"
        "           /home/user/train.py:4 step\n"
        "  earlier: memset on stream 3 (non-blocking)\n"
        "           /home/user/train.py:3 step\n"
        "  fix:     record an event on stream 3 after the memset (train.py:3)"
        " and make stream 4 wait for it before the memset (train.py:4)"
    )


PENDING = (
    Launch(3, "add", pending=True),
    Access(4096, 8192, AccessMode.WRITE, Precision.ASSUMED),
    Fill(4, 4096, 64),
)
READ_BACK = (Access(4096, 5120, AccessMode.WRITE), Accessed())


def renumber_calls(batch: Batch, *seqs: int) -> Batch:
    """Renumber the calls of a batch."""
    records = batch.records.copy()
    records["seq"] = seqs
    return replace(batch, records=records)


def test_accesses_recorded_after_later_calls_are_analysed_in_order(tmp_path: Path) -> None:
    detector, report = RaceDetector(), RaceCollector()
    assert (
        detector.feed(
            renumber_calls(batch(tmp_path / "a", *FIRST_FILL[:2], *PENDING), 1, 2, 3, 3, 4), report
        )
        == []
    )
    (race,) = detector.feed(renumber_calls(batch(tmp_path / "b", *READ_BACK), 3, 3), report)

    assert race.confidence is Confidence.CERTAIN
    assert detector.finish(report) == {}
    result = detector.result(report)
    assert (result.coverage.launches_exact, result.coverage.accesses_assumed) == (1, 0)
    assert result.gaps == {}


def test_launch_never_read_back_is_analyzed_by_its_assumed_accesses(tmp_path: Path) -> None:
    detector, report = RaceDetector(), RaceCollector()
    batch_read = renumber_calls(batch(tmp_path / "a", *FIRST_FILL[:2], *PENDING), 1, 2, 3, 3, 4)
    detector.feed(batch_read, report)

    ((trace, (race,)),) = detector.finish(report).items()
    assert trace == (batch_read.process, batch_read.trace_number)
    assert race.confidence is Confidence.LIKELY
    result = detector.result(report)
    assert result.gaps == {"launch whose accesses were never read back": 1}
    assert result.coverage.launches_assumed == 1


# --- The analysis of a truncated log reports everything before its end, and where the log ends -----

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
