"""``cudakit.profile()``, ``cudakit.timed()`` and ``pytest --cuda-profile`` on a GPU, in other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]

BLOCK = """
import json
import torch
import cudakit
from cudakit.serialize import to_plain

with cudakit.profile() as profile:
    x = torch.rand(1024, 1024, device="cuda")
    for _ in range(20):
        with cudakit.range("step"):
            x = torch.relu(x @ x) / 1024
    torch.cuda.synchronize()
print(json.dumps(to_plain(profile.result)))
"""

TIMED = """
import torch
import cudakit

x = torch.rand(4096, 4096, device="cuda")
y = x @ x
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
with cudakit.timed() as timing:
    begin.record()
    for _ in range(10):
        y = x @ x
    end.record()
seconds = timing.seconds
assert abs(seconds - begin.elapsed_time(end) / 1e3) < 0.1 * seconds, (seconds, begin.elapsed_time(end))
"""

SUITE = """
import torch

def test_product():
    x = torch.rand(1024, 1024, device="cuda")
    (x @ x).sum().item()

def test_without_gpu():
    pass
"""


def _run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_block_is_profiled(tmp_path: Path) -> None:
    result = json.loads(_run("-c", BLOCK, cwd=tmp_path).splitlines()[-1])
    (device,) = result["devices"]
    assert result["gaps"] == {}
    assert sum(kernel["calls"] for kernel in device["kernels"]) >= 40
    idle = sum(device["measured"]["idle"].values())
    assert device["measured"]["busy_ns"] + idle == device["measured"]["length_ns"]


def test_timed_block_agrees_with_events_of_torch(tmp_path: Path) -> None:
    _run("-c", TIMED, cwd=tmp_path)


def test_plugin_prints_the_gpu_time_of_each_test(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--cuda-profile", "test_suite.py")
    lines = _run(*arguments, cwd=tmp_path).splitlines()
    (line,) = (line for line in lines if "launches" in line)
    assert line.endswith("test_suite.py::test_product")
