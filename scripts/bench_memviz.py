"""Measure ``cudakit memviz`` against a bare ``pickle.load`` of the same file, in the same run.

    python scripts/bench_memviz.py [SNAPSHOT.pkl ...]

Without files it makes a million events with scripts/make_snapshots.py. The bare load runs with garbage
collection paused, and only the load is timed; memviz is timed as a whole process, from its start to the
printed report. Runs alternate; medians are compared. The last line times ``cudakit --help``.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_RUNS = 5

# With -P the installed package runs, wherever this is started: a source tree has no compiled reader.
_CUDAKIT = [sys.executable, "-P", "-m", "cudakit"]

_BARE = """
import gc, pickle, sys, time
gc.disable()
with open(sys.argv[1], "rb") as file:
    start = time.perf_counter()
    snapshot = pickle.load(file)
    print(time.perf_counter() - start, flush=True)
import os
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One measured process."""

    seconds: float
    peak_bytes: int


def run(command: list[str]) -> tuple[Run, str]:
    """Run a command to its end: whole-process time, peak memory, and what it printed."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    printed = "".join(process.stdout or ())
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return Run(seconds, usage.ru_maxrss * 1024), printed


def bare_load(file: str) -> Run:
    """Time pickle.load alone, in a process of its own."""
    measured, printed = run([sys.executable, "-c", _BARE, file])
    return Run(float(printed), measured.peak_bytes)


def memviz(file: str) -> Run:
    """Time the whole command."""
    return run([*_CUDAKIT, "memviz", file])[0]


def compare(file: str) -> None:
    """Print both medians and their ratios."""
    pairs = [(bare_load(file), memviz(file)) for _ in range(_RUNS)]
    bare, ours = zip(*pairs, strict=True)
    load, report = _median(bare, _seconds), _median(ours, _seconds)
    load_peak, report_peak = _median(bare, _peak), _median(ours, _peak)
    size = Path(file).stat().st_size
    print(f"{Path(file).name}, {size / 1e6:.0f} MB, median of {_RUNS}")
    print(f"  pickle.load   {load:6.2f} s   {load_peak / 2**20:6.0f} MiB")
    print(f"  memviz        {report:6.2f} s   {report_peak / 2**20:6.0f} MiB")
    print(f"  ratio         {report / load:6.2f}     {report_peak / load_peak:6.2f}")


def _seconds(measured: Run) -> float:
    return measured.seconds


def _peak(measured: Run) -> float:
    return float(measured.peak_bytes)


def _median(runs: tuple[Run, ...], of: Callable[[Run], float]) -> float:
    return statistics.median(map(of, runs))


def time_help() -> None:
    """Print how long ``cudakit --help`` takes, and a Python that does nothing."""
    helps = [run([*_CUDAKIT, "--help"])[0].seconds for _ in range(9)]
    nothing = [run([sys.executable, "-c", "pass"])[0].seconds for _ in range(9)]
    print(
        f"cudakit --help {statistics.median(helps) * 1e3:.0f} ms, "
        f"python -c pass {statistics.median(nothing) * 1e3:.0f} ms, median of 9"
    )


def main() -> None:
    """Compare the files named, or two that are made for it."""
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        files = sys.argv[1:]
        if not files:
            made = Path(__file__).with_name("make_snapshots.py")
            subprocess.run([sys.executable, str(made), folder], check=True)
            files = sorted(map(str, Path(folder).glob("*.pkl")))
        for file in files:
            compare(file)
    time_help()


if __name__ == "__main__":
    main()
