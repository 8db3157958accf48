"""Reports of a log: NVTX ranges and owners of races that a trace contains, in every format."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path

import pytest
from invocation import Cli

from cudakit.stacks import Frame, Stack
from cudakit.trace.events import Event, EventBody, Fill, RangePop, RangePush, StreamCreate
from cudakit.trace.kinds import StreamFlag
from cudakit.trace.run_log import LogWriter, Outcome
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import pack

STEP = Frame("step", "/home/me/train.py", 12)
RNN = Frame("forward", "/venv/lib/python3.12/site-packages/torch/nn/modules/rnn.py", 1124)
STACKS: list[Stack] = [(), (STEP,), (RNN, STEP)]
FIRST, SECOND = 21, 22
IN_STEP = "in range 'step 7 / prefetch'"


def write_log(path: Path, *, site: int, program_calls: tuple[int, int]) -> None:
    """Write the log of two fills that race, in the ranges "step 7" and "prefetch"."""
    bodies: tuple[tuple[EventBody, int], ...] = (
        (StreamCreate(FIRST, StreamFlag.NON_BLOCKING), 0),
        (StreamCreate(SECOND, StreamFlag.NON_BLOCKING), 0),
        (RangePush("step 7"), 0),
        (Fill(FIRST, 4096, 256), program_calls[0]),
        (RangePush("prefetch"), 0),
        (Fill(SECOND, 4096, 256), program_calls[1]),
        (RangePop(), 0),
        (RangePop(), 0),
    )
    events = [
        Event(body, seq=seq, thread=5, context=1, site=site, program_call=program_call)
        for seq, (body, program_call) in enumerate(bodies, 1)
    ]
    strings: dict[str, int] = {"": 0}
    records = pack(events, lambda text: strings.setdefault(text, len(strings)))
    with path.open("wb") as file:
        log = LogWriter(file)
        log.add(Batch(7, records, list(strings), STACKS))
        log.finish(Outcome(exit_status=0))


def test_every_format_names_the_ranges_of_a_race(cli: Cli, tmp_path: Path) -> None:
    write_log(tmp_path / "races.log", site=1, program_calls=(3, 4))
    files = [tmp_path / f"report.{suffix}" for suffix in ("txt", "html", "md", "json")]

    cli("sanitize", tmp_path / "races.log", *(word for file in files for word in ("-o", file)))

    texts = [" ".join(unescape(file.read_text()).split()) for file in files]
    assert [IN_STEP in text for text in texts[:3]] == [True, True, True]
    (race,) = json.loads(files[3].read_text())["races"]
    assert [each["name"] for each in race["current"]["ranges"]] == ["step 7", "prefetch"]
    assert [each["name"] for each in race["previous"]["ranges"]] == ["step 7"]


@pytest.mark.parametrize(
    ("site", "program_calls", "options", "exit_code", "owner"),
    [
        (2, (3, 3), (), 0, "library"),
        (2, (3, 3), ("--internal",), 1, "library"),
        (2, (3, 4), (), 1, "program"),
        (2, (0, 0), (), 1, "program"),
        (1, (3, 3), (), 1, "program"),
    ],
    ids=["one-call", "internal", "two-calls", "unknown-calls", "no-library"],
)
def test_exit_code_follows_the_owner_of_the_race(
    cli: Cli,
    tmp_path: Path,
    site: int,
    program_calls: tuple[int, int],
    options: tuple[str, ...],
    exit_code: int,
    owner: str,
) -> None:
    log, report = tmp_path / "races.log", tmp_path / "report.json"
    write_log(log, site=site, program_calls=program_calls)

    result = cli("sanitize", log, *options, "-o", report)

    assert result.exit_code == exit_code
    (race,) = json.loads(report.read_text())["races"]
    assert race["owner"] == owner


def test_baseline_of_a_run_has_no_races_of_libraries(cli: Cli, tmp_path: Path) -> None:
    log, baseline = tmp_path / "races.log", tmp_path / "baseline.json"
    write_log(log, site=2, program_calls=(3, 3))

    cli("sanitize", log, "--write-baseline", baseline)

    assert json.loads(baseline.read_text())["races"] == []
