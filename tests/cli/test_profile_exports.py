"""Tests of the files that ``cudakit profile LOG -o FILE`` writes for other tools."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
from invocation import run_cli
from profile_synthetic import US, Program

from cudakit.cli.profile import ACTIVITY_FORMATS
from cudakit.trace.run_log import LogWriter, Outcome

# Mangled name of ``void scale<float>(float*, int)``.
MANGLED = "_Z5scaleIfEvPT_i"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    program = Program()
    for step in range(5):
        with program.range(f"step {step}"):
            program.kernel(MANGLED, 20 * US, line=12)
    path = tmp_path / "profile.log"
    program.write_log(path)
    return path


@pytest.mark.parametrize("suffix", [*ACTIVITY_FORMATS, "html"])
def test_profile_of_a_log_is_written_in_every_format(log: Path, suffix: str) -> None:
    path = log.with_name(f"profile.{suffix}")
    run = run_cli("profile", log, "-o", path)
    assert run.exit_code == 0, run.stderr
    assert f"Wrote {path}" in run.stderr
    content = path.read_bytes()
    if suffix.endswith(".gz"):
        content = gzip.decompress(content)
    assert b"scale<float>" in content or b"scale\\u003cfloat>" in content
    assert MANGLED.encode() not in content


def test_rows_of_the_csv_are_the_kernels_with_their_lines(log: Path) -> None:
    path = log.with_name("kernels.csv")
    assert run_cli("profile", log, "-q", "-o", path).exit_code == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["duration_ns"] for row in rows] == ["20000"] * 5
    assert {row["name"] for row in rows} == {"void scale<float>(float*, int)"}
    assert {row["call_site"] for row in rows} == {"/home/me/train.py:12 step"}


def test_ranges_of_the_chrome_trace_contain_the_launches(log: Path) -> None:
    path = log.with_name("kernels.trace.json")
    assert run_cli("profile", log, "-q", "-o", path).exit_code == 0
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = {
        category: [
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("cat") == category and event["ph"] == "X"
        ]
        for category in ("user_annotation", "cuda_runtime")
    }
    assert len(spans["user_annotation"]) == len(spans["cuda_runtime"]) == 5
    for (first, last), (start, end) in zip(*spans.values(), strict=True):
        assert first <= start < end <= last + 0.001


@pytest.mark.parametrize("suffix", [*ACTIVITY_FORMATS, "html"])
def test_profile_without_activities_is_written_in_every_format(tmp_path: Path, suffix: str) -> None:
    log = tmp_path / "profile.log"
    with log.open("wb") as file:
        LogWriter(file).finish(Outcome(exit_status=0))
    run = run_cli("profile", log, "-o", tmp_path / f"profile.{suffix}")
    assert run.exit_code == 0, run.stderr
