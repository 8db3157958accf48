"""Tests that reports of races and of memory contain the NVTX ranges of PyTorch, on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cudakit

pytestmark = pytest.mark.gpu

# The copy on the side stream may read the gradient while the backward pass still writes it.
RACE = """
import torch
from torch.cuda import nvtx

side = torch.cuda.Stream()
weights = torch.ones(1 << 20, device="cuda", requires_grad=True)
weights.grad = torch.zeros_like(weights)
copy = torch.zeros_like(weights)
torch.cuda.synchronize()
nvtx.range_push("step 7")
loss = (weights * 2).sum()
with nvtx.range("backward"):
    loss.backward()
nvtx.range_pop()
with nvtx.range("read gradient"), torch.cuda.stream(side):
    copy.copy_(weights.grad)
torch.cuda.synchronize()
"""

MEMORY = """
import torch
from torch.cuda import nvtx

kept = torch.zeros(1 << 20, device="cuda")
with nvtx.range("step 7"):
    with nvtx.range("forward"):
        kept = kept * 2
    with nvtx.range("backward"):
        large = torch.zeros(1 << 24, device="cuda")
        del large
"""


def run(directory: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("torch")
    (directory / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, "-P", "-m", "cudakit", "run", *options, "program.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def names(side: dict[str, Any]) -> list[str]:
    return [nvtx_range["name"] for nvtx_range in side["ranges"]]


def test_race_with_backward_pass_names_its_ranges(tmp_path: Path) -> None:
    result = run(tmp_path, RACE, "--sanitize", "-o", "races.json", "-o", "races.txt")
    report = json.loads((tmp_path / "races.json").read_text(encoding="utf-8"))

    assert result.returncode == 1, result.stderr
    assert [names(race["previous"]) for race in report["races"]] == [["step 7", "backward"]]
    assert [names(race["current"]) for race in report["races"]] == [["read gradient"]]
    text = " ".join((tmp_path / "races.txt").read_text(encoding="utf-8").split())
    assert "in range 'step 7 / backward'" in text


def test_peak_of_memory_is_in_its_range(tmp_path: Path) -> None:
    result = run(tmp_path, MEMORY, "--memory", "--snapshot", "memory.pickle")
    assert result.returncode == 0, result.stderr

    (device,) = (
        device
        for device in cudakit.memviz(tmp_path / "memory.pickle").devices
        if device.device is not None
    )

    assert device.peak.ranges == ("step 7", "backward")
