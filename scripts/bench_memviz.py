"""Compare the time and memory of ``cudakit memviz`` with those of ``pickle.load`` of the same file.

    python scripts/bench_memviz.py [--without-compiler] [SNAPSHOT.pkl ...]

Without files, scripts/make_snapshots.py makes three of a million events. pickle.load is timed alone, with
garbage collection off; memviz is timed as a whole process. ``--without-compiler`` times an installation
without the compiled reader. Runs alternate, and the medians are printed. For a file with a failed allocation,
the analysis is timed with and without the replays of remedies. The last line has the time of
``cudakit --help``.
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

# With -P the installed package runs, also from the source tree, which has no compiled reader.
_CUDAKIT = [sys.executable, "-P", "-m", "cudakit"]
# The same in an interpreter that finds no compiled reader, as after an installation without a compiler.
_WITHOUT_COMPILER = """
import sys
sys.modules["cudakit.core.memory.load._pickled"] = None
from cudakit.cli import main
sys.exit(main(sys.argv[1:]))
"""

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


# Prints the seconds of the analysis without and with replays; empty without a failed allocation.
_REPLAYS = """
import sys, time
from cudakit.api.memory import new_allocator
from cudakit.core.memory.analyze import MemorySpec, analyze
from cudakit.core.memory.load import load
from cudakit.torch_rules.actions import Action
snapshot = load(sys.argv[1])
if any((device.events.action == Action.OOM).any() for device in snapshot.devices):
    for allocator in (None, new_allocator):
        start = time.perf_counter()
        analyze([snapshot], MemorySpec(), allocator)
        print(time.perf_counter() - start)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """The time and the peak memory of a process."""

    seconds: float
    peak_bytes: int


def run(command: list[str]) -> tuple[Run, str]:
    """Run a command; return its time, peak memory and output."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    printed = "".join(process.stdout or ())
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return Run(seconds, usage.ru_maxrss * 1024), printed


def time_pickle_load(file: str) -> Run:
    """Time pickle.load alone, in its own process."""
    measured, printed = run([sys.executable, "-c", _BARE, file])
    return Run(float(printed), measured.peak_bytes)


def time_memviz(file: str, *, has_compiler: bool = True) -> Run:
    """Time ``cudakit memviz`` as a whole process."""
    python = [sys.executable, "-P", "-c", _WITHOUT_COMPILER]
    return run([*(_CUDAKIT if has_compiler else python), "memviz", file])[0]


def compare(file: str, *, has_compiler: bool) -> None:
    """Print both medians and their ratios."""
    pairs = [
        (time_pickle_load(file), time_memviz(file, has_compiler=has_compiler)) for _ in range(_RUNS)
    ]
    bare, ours = zip(*pairs, strict=True)
    load, report = _median(bare, _seconds), _median(ours, _seconds)
    load_peak, report_peak = _median(bare, _peak), _median(ours, _peak)
    size = Path(file).stat().st_size
    print(f"{Path(file).name}, {size / 1e6:.0f} MB, median of {_RUNS}")
    print(f"  pickle.load   {load:6.2f} s   {load_peak / 2**20:6.0f} MiB")
    print(f"  memviz        {report:6.2f} s   {report_peak / 2**20:6.0f} MiB")
    print(f"  ratio         {report / load:6.2f}     {report_peak / load_peak:6.2f}")
    time_replays(file, report)


def time_replays(file: str, report: float) -> None:
    """Print by how much the replays of remedies lengthen a report of ``report`` seconds."""
    runs = [run([sys.executable, "-P", "-c", _REPLAYS, file])[1].split() for _ in range(3)]
    if runs[0]:
        without, replayed = (
            statistics.median(map(float, times)) for times in zip(*runs, strict=True)
        )
        added = replayed - without
        print(
            f"  replays       {added:6.2f} s   {report / (report - added):.2f} times the report without"
        )


def _seconds(measured: Run) -> float:
    return measured.seconds


def _peak(measured: Run) -> float:
    return float(measured.peak_bytes)


def _median(runs: tuple[Run, ...], of: Callable[[Run], float]) -> float:
    return statistics.median(map(of, runs))


def time_help() -> None:
    """Print the time of ``cudakit --help``, and of Python without a program."""
    helps = [run([*_CUDAKIT, "--help"])[0].seconds for _ in range(9)]
    nothing = [run([sys.executable, "-c", "pass"])[0].seconds for _ in range(9)]
    print(
        f"cudakit --help {statistics.median(helps) * 1e3:.0f} ms, "
        f"python -c pass {statistics.median(nothing) * 1e3:.0f} ms, median of 9"
    )


def main() -> None:
    """Compare the given files, or two generated ones."""
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        files = [argument for argument in sys.argv[1:] if argument != "--without-compiler"]
        if not files:
            made = Path(__file__).with_name("make_snapshots.py")
            subprocess.run([sys.executable, str(made), folder], check=True)
            files = sorted(map(str, Path(folder).glob("*.pkl")))
        for file in files:
            compare(file, has_compiler="--without-compiler" not in sys.argv)
    time_help()


if __name__ == "__main__":
    main()
