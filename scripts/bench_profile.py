"""Time the report on a profile of many kernels: reading the log, the analysis, the report.

    python scripts/bench_profile.py [KERNELS]

The log has an API call for each kernel, a wait after each step of 500 kernels, NVTX ranges and call stacks.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from cudakit.profile.analysis import analyze
from cudakit.profile.report import report
from cudakit.profile.timeline import load_log
from cudakit.report import console
from cudakit.stacks import Frame
from cudakit.trace.kinds import EventKind
from cudakit.trace.run_log import LogWriter, Outcome
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import RECORD, Records, layout

STEP = 500
NAMES = 60
SITES = 300


def records(kind: EventKind, count: int) -> Records:
    """Return empty records of a kind."""
    rows = np.zeros(count, layout(kind))
    rows["kind"] = kind
    return rows


def write_log(path: Path, kernels: int) -> None:
    """Write the log of a program with many short kernels on one stream."""
    random = np.random.default_rng(1)
    number = np.arange(kernels)
    step = number // STEP
    launch = number * 6_000 + step * 80_000
    calls = records(EventKind.API_CALL, kernels)
    calls["function"], calls["correlation"], calls["thread"] = 1, number + 1, 7
    calls["start_ns"], calls["end_ns"] = launch, launch + 4_000
    calls["site"] = number % STEP % SITES + 1
    runs = records(EventKind.KERNEL_RUN, kernels)
    duration = random.integers(1_500, 9_000, kernels)
    start = np.maximum.accumulate(launch + 5_000 - np.cumsum(duration)) + np.cumsum(duration)
    runs["start_ns"], runs["end_ns"] = start, start + duration
    runs["name"], runs["correlation"], runs["stream"] = number % STEP % NAMES + 4, number + 1, 1
    runs["grid"], runs["block"] = 64, 128
    last = number[STEP - 1 :: STEP]
    waits = records(EventKind.API_CALL, len(last))
    waits["function"], waits["correlation"], waits["thread"] = 2, kernels + 1 + last, 7
    waits["start_ns"], waits["end_ns"] = launch[last] + 5_000, start[last] + duration[last] + 3_000
    pushes, pops = records(EventKind.RANGE_PUSH, len(last)), records(EventKind.RANGE_POP, len(last))
    pushes["name"], pushes["time_ns"], pushes["thread"] = 3, launch[::STEP] - 500, 7
    pops["time_ns"], pops["thread"] = waits["end_ns"] + 500, 7
    strings = ["", "cudaLaunchKernel", "cudaStreamSynchronize", "step"]
    strings += [f"_Z{index + 10}kernel_{index:03}PfS_i" for index in range(NAMES)]
    frame = Frame("main", "/home/me/train.py", 1)
    stacks = [(), *((Frame("f", "/home/me/model.py", line), frame) for line in range(SITES))]
    with path.open("wb") as file:
        log = LogWriter(file)
        for table in (calls, runs, waits, pushes, pops):
            log.add(Batch(100, table.view(RECORD), strings, stacks))
        log.finish(Outcome(exit_status=0))


def main() -> None:
    """Print the time of each part."""
    kernels = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "profile.log"
        write_log(path, kernels)
        times = [time.perf_counter()]
        activities, _ = load_log(path)
        times.append(time.perf_counter())
        analysis = analyze(activities)
        times.append(time.perf_counter())
        text = console.render(
            report(analysis.result), width=80, color=False, ascii_only=False, height=50
        )
        times.append(time.perf_counter())
    print("\n".join(text.splitlines()[:3]))
    parts = ("read the log", "analyze", "report")
    for part, begin, end in zip(parts, times, times[1:], strict=False):
        print(f"{part:14}{end - begin:8.2f} s")
    print(f"{'analyze and report':20}{times[3] - times[1]:.2f} s for {kernels:,} kernels")


if __name__ == "__main__":
    main()
