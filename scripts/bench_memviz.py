"""Compare the time and memory of ``cudakit memviz`` with those of ``pickle.load`` of the same file.

    python scripts/bench_memviz.py [--without-compiler] [SNAPSHOT.pkl ...]

Without files, scripts/make_snapshots.py creates three snapshots of a million events. For pickle.load only the
call is timed, without garbage collection; for memviz the whole process. ``--without-compiler`` times an
installation without the compiled reader. The runs alternate. The printed medians are elapsed time, CPU time
(which depends less on other programs of the machine) and peak memory. For a file with a failed allocation,
the analysis is timed with and without the replays of remedies. The last line shows the time of
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

# Because of -P, the installed package runs, not the source tree, which has no compiled reader.
CUDAKIT = [sys.executable, "-P", "-m", "cudakit"]
# The same in an interpreter that finds no compiled reader, as after an installation without a compiler.
_PROGRAM_WITHOUT_COMPILER = """
import sys
sys.modules["cudakit.memory.load._pickled"] = None
from cudakit.cli import main
sys.exit(main(sys.argv[1:]))
"""

_PICKLE_LOAD_PROGRAM = """
import gc, pickle, sys, time
gc.disable()
with open(sys.argv[1], "rb") as file:
    start, cpu_start = time.perf_counter(), time.process_time()
    snapshot = pickle.load(file)
    print(time.perf_counter() - start, time.process_time() - cpu_start, flush=True)
import os
os._exit(0)
"""


# Prints the seconds of the analysis without and with replays; nothing for a file without a failed allocation.
_REPLAY_PROGRAM = """
import sys, time
from cudakit.api.memory import new_allocator
from cudakit.memory.selection import MemorySpec
from cudakit.memory.analyze import analyze
from cudakit.memory.load import load
from cudakit.memory.snapshot import Action
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

    seconds: float  # elapsed time
    cpu_s: float
    peak_bytes: int


def run(command: list[str]) -> tuple[Run, str]:
    """Run a command; return its time, peak memory and output."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    output = "".join(process.stdout or ())
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024), output


def time_pickle_load(file: str) -> Run:
    """Time pickle.load alone, in its own process."""
    process_run, output = run([sys.executable, "-c", _PICKLE_LOAD_PROGRAM, file])
    seconds, cpu_s = map(float, output.split())
    return Run(seconds, cpu_s, process_run.peak_bytes)


def time_memviz(file: str, *, has_compiler: bool) -> Run:
    """Time ``cudakit memviz`` as a whole process."""
    without_compiler = [sys.executable, "-P", "-c", _PROGRAM_WITHOUT_COMPILER]
    return run([*(CUDAKIT if has_compiler else without_compiler), "memviz", file])[0]


def compare(file: str, *, has_compiler: bool) -> None:
    """Print the median time and peak memory of pickle.load and of memviz, and their ratios."""
    pairs = [
        (time_pickle_load(file), time_memviz(file, has_compiler=has_compiler)) for _ in range(_RUNS)
    ]
    load_runs, memviz_runs = zip(*pairs, strict=True)
    load_s, memviz_s = _median(load_runs, _seconds), _median(memviz_runs, _seconds)
    load_cpu_s, memviz_cpu_s = _median(load_runs, _cpu), _median(memviz_runs, _cpu)
    load_peak, memviz_peak = _median(load_runs, _peak), _median(memviz_runs, _peak)
    size = Path(file).stat().st_size
    print(f"{Path(file).name}, {size / 1e6:.0f} MB, median of {_RUNS}")
    print("                elapsed        CPU      memory")
    for name, seconds, cpu_s, peak in (
        ("pickle.load", load_s, load_cpu_s, load_peak),
        ("memviz", memviz_s, memviz_cpu_s, memviz_peak),
    ):
        print(f"  {name:12} {seconds:6.2f} s   {cpu_s:6.2f} s   {peak / 2**20:6.0f} MiB")
    cpu_ratio, memory_ratio = memviz_cpu_s / load_cpu_s, memviz_peak / load_peak
    print(f"  ratio        {memviz_s / load_s:6.2f}     {cpu_ratio:6.2f}     {memory_ratio:6.2f}")
    time_replays(file, memviz_s)


def time_replays(file: str, memviz_s: float) -> None:
    """Print the time that the replays of remedies add to memviz, which takes ``memviz_s`` seconds."""
    runs = [run([sys.executable, "-P", "-c", _REPLAY_PROGRAM, file])[1].split() for _ in range(3)]
    if runs[0]:
        without_replays, with_replays = (
            statistics.median(map(float, times)) for times in zip(*runs, strict=True)
        )
        added_s = with_replays - without_replays
        ratio = memviz_s / (memviz_s - added_s)
        print(f"  replays       {added_s:6.2f} s   {ratio:.2f} times the time without replays")


def _seconds(run: Run) -> float:
    return run.seconds


def _cpu(run: Run) -> float:
    return run.cpu_s


def _peak(run: Run) -> float:
    return float(run.peak_bytes)


def _median(runs: tuple[Run, ...], figure: Callable[[Run], float]) -> float:
    return statistics.median(map(figure, runs))


def main() -> None:
    """Compare the times for the given files, or for generated files."""
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        files = [argument for argument in sys.argv[1:] if argument != "--without-compiler"]
        if not files:
            generator = Path(__file__).with_name("make_snapshots.py")
            subprocess.run([sys.executable, str(generator), folder], check=True)
            files = sorted(map(str, Path(folder).glob("*.pkl")))
        for file in files:
            compare(file, has_compiler="--without-compiler" not in sys.argv)
    help_s = [run([*CUDAKIT, "--help"])[0].seconds for _ in range(9)]
    python_s = [run([sys.executable, "-c", "pass"])[0].seconds for _ in range(9)]
    print(
        f"cudakit --help {statistics.median(help_s) * 1e3:.0f} ms, "
        f"python -c pass {statistics.median(python_s) * 1e3:.0f} ms, median of 9"
    )


if __name__ == "__main__":
    main()
