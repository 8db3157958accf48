"""bench_programs.py runs the kinds of processes in turn, and reports programs that print no time."""

from __future__ import annotations

import sys
from pathlib import Path

import bench_programs
import pytest

PROGRAM = """\
import os, pathlib, sys
log = pathlib.Path(sys.argv[1])
kind = "csan" if os.environ.get("TORCH_CUDA_SANITIZER") else "plain"
with log.open("a") as file:
    file.write(kind + " ")
print("STEP test", 2.0 if kind == "csan" else 0.5, "ms")
"""


def test_kinds_alternate_and_are_compared_with_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    log, program = tmp_path / "log", f"{tmp_path / 'program.py'} {tmp_path / 'log'}"
    arguments = ["bench", program, "--kinds", "plain,csan", "--processes", "3"]
    monkeypatch.setattr(sys, "argv", arguments)

    assert bench_programs.main() == 0
    assert log.read_text().split() == ["plain", "csan"] * 3
    _, plain, csan = capsys.readouterr().out.splitlines()
    assert plain.split()[:4] == ["plain", "0.500", "ms", "1.00"]
    assert csan.split()[:4] == ["csan", "2.000", "ms", "4.00"]


def test_program_without_time_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "program.py"
    script.write_text("raise SystemExit('no GPU')", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["bench", str(script), "--kinds", "plain"])

    assert bench_programs.main() == 1
    assert "no GPU" in capsys.readouterr().out
