from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cudakit.sanitize.detector import RaceDetector
from cudakit.sanitize.findings import RaceCollector, findings, message
from cudakit.sanitize.races import Confidence
from cudakit.stacks import Frame
from cudakit.trace.events import Access, Accessed, Event, EventBody, Fill, Launch, StreamCreate
from cudakit.trace.kinds import AccessMode, Precision, StreamFlag
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
