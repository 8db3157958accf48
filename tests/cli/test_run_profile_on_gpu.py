"""``run --profile`` on a GPU: kernels, copies, graphs and times of real programs."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cudakit.profile.timeline import Activities, ActivityCollector
from cudakit.trace.kinds import EventKind, MemoryKind
from cudakit.trace.run_log import LogReader

pytestmark = pytest.mark.gpu

CUDAKIT_RUN = (sys.executable, "-P", "-m", "cudakit", "run")


def profile(directory: Path, program: str, *options: str, library: str = "torch") -> Activities:
    """Run a program, and return the activities of its only process that used CUDA."""
    if not find_spec(library):
        pytest.skip(f"{library} is not installed")
    (directory / "program.py").write_text(program, encoding="utf-8")
    result = subprocess.run(
        [*CUDAKIT_RUN, "--profile", "-f", "-q", "--log", "run.log", *options, "program.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    collector = ActivityCollector()
    with LogReader(directory / "run.log") as log:
        for batch in log.batches():
            collector.add(batch)
    (activities,) = collector.activities()
    return activities


def line_of_calls(activities: Activities) -> dict[int, int]:
    """Return the line of the program that made each call, by correlation."""
    lines = {}
    calls = activities.records[EventKind.API_CALL]
    for correlation, site in zip(
        calls["correlation"].tolist(), calls["site"].tolist(), strict=True
    ):
        stack = activities.stacks[site]
        lines[correlation] = next(
            (frame.line for frame in stack if frame.filename.endswith("program.py")), 0
        )
    return lines


def test_each_kernel_has_the_line_that_launched_it(tmp_path: Path) -> None:
    activities = profile(
        tmp_path,
        "import torch\n"
        "a = torch.zeros(64, device='cuda')\n"
        "for _ in range(100):\n"
        "    a.add_(1)\n"
        "for _ in range(50):\n"
        "    a.mul_(2)\n"
        "torch.cuda.synchronize()\n",
    )
    lines = line_of_calls(activities)
    launches = [
        lines[each] for each in activities.records[EventKind.KERNEL_RUN]["correlation"].tolist()
    ]
    assert (launches.count(4), launches.count(6)) == (100, 50)
    assert not len(activities.records[EventKind.GAP])


def test_work_starts_after_its_call_and_ends_before_the_wait(tmp_path: Path) -> None:
    activities = profile(
        tmp_path,
        "import torch\n"
        "a = torch.zeros(1 << 20, device='cuda')\n"
        "for _ in range(100):\n"
        "    a.add_(1)\n"
        "    torch.cuda.synchronize()\n",
    )
    calls, kernels = (
        activities.records[EventKind.API_CALL],
        activities.records[EventKind.KERNEL_RUN],
    )
    starts = dict(zip(calls["correlation"].tolist(), calls["start_ns"].tolist(), strict=True))
    # CUPTI converts times of the GPU to the clock of the host with an error of some microseconds.
    assert all(
        start > starts[correlation] - 10_000
        for start, correlation in zip(
            kernels["start_ns"].tolist(), kernels["correlation"].tolist(), strict=True
        )
    )
    assert (kernels["end_ns"] > kernels["start_ns"]).all()
    assert kernels["end_ns"].max() < calls["end_ns"].max() + 10_000


def test_kernels_of_a_graph_have_the_line_of_their_capture(tmp_path: Path) -> None:
    activities = profile(
        tmp_path,
        "import torch\n"
        "a = torch.zeros(64, device='cuda')\n"
        "a.add_(1)\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    a.add_(1)\n"
        "    a.mul_(2)\n"
        "for _ in range(10):\n"
        "    graph.replay()\n"
        "torch.cuda.synchronize()\n",
    )
    sites = activities.records[EventKind.GRAPH_NODE_SITE]
    lines = {}
    for node, site in zip(sites["graph_node"].tolist(), sites["site"].tolist(), strict=True):
        frames = [f for f in activities.stacks[site] if f.filename.endswith("program.py")]
        lines[node] = frames[0].line if frames else 0
    kernels = activities.records[EventKind.KERNEL_RUN]
    nodes = kernels["graph_node"][kernels["graph_node"] > 0].tolist()
    assert sorted(lines[node] for node in nodes) == [6] * 10 + [7] * 10


def test_copies_tell_pageable_from_pinned_memory(tmp_path: Path) -> None:
    activities = profile(
        tmp_path,
        "import torch\n"
        "torch.zeros(1 << 20).cuda()\n"
        "torch.zeros(1 << 20).pin_memory().cuda(non_blocking=True)\n"
        "torch.cuda.synchronize()\n",
    )
    copies = activities.records[EventKind.COPY_RUN]
    assert copies["source_memory"].tolist() == [MemoryKind.PAGEABLE, MemoryKind.PINNED]
    assert copies["size_bytes"].tolist() == [4 << 20, 4 << 20]


def test_only_the_named_range_is_profiled(tmp_path: Path) -> None:
    activities = profile(
        tmp_path,
        "import torch\n"
        "a = torch.zeros(64, device='cuda')\n"
        "for i in range(6):\n"
        "    with torch.cuda.nvtx.range('odd' if i % 2 else 'even'):\n"
        "        a.add_(1)\n"
        "        torch.cuda.synchronize()\n",
        "--range",
        "odd",
    )
    assert len(activities.records[EventKind.KERNEL_RUN]) == 3
    assert activities.records[EventKind.PROFILE_WINDOW]["is_open"].tolist() == [True, False] * 3


def test_program_continues_after_the_duration(tmp_path: Path) -> None:
    activities = profile(
        tmp_path,
        "import time, torch\n"
        "a = torch.zeros(64, device='cuda', requires_grad=True)\n"
        "end = time.monotonic() + 4\n"
        "while time.monotonic() < end:\n"
        "    (a * 2).sum().backward()\n"
        "torch.cuda.synchronize()\n",
        "--duration",
        "1",
    )
    (opened, closed) = activities.records[EventKind.PROFILE_WINDOW]["time_ns"].tolist()
    assert 0.9e9 < closed - opened < 2e9
    kernels = activities.records[EventKind.KERNEL_RUN]
    assert len(kernels)
    assert kernels["start_ns"].max() < closed + 1e9


def test_device_is_named(tmp_path: Path) -> None:
    activities = profile(tmp_path, "import cupy\ncupy.arange(10).sum().item()\n", library="cupy")
    (device,) = activities.records[EventKind.DEVICE_INFO]
    assert activities.strings[device["name"]].startswith("NVIDIA")
    assert device["multiprocessors"] > 0
    assert device["memory_bytes"] > 1 << 30
