"""Measure the cost of ``cudakit run --sanitize`` on a GPU: against plain Python and PyTorch's CSAN.

    python scripts/bench_sanitize.py [-o FILE.json] [--rounds N]

Each figure is the median over processes. The compared processes alternate, so that other load on the machine
affects all equally:

* a training step of a small model: plain, under cudakit with assumed accesses, with templates (auto) and with
  exact accesses, and under CSAN; the same while a second thread keeps the interpreter busy;
* a kernel that streams 1 GB: plain, with templates and with exact accesses, and under CSAN;
* the build of the device patch for exact accesses, with an empty and with a full cache;
* the recorder alone, in a launch-bound loop;
* the start of a process that never uses CUDA, without and with the agent;
* the engine alone, on the trace of training steps.

The runs with exact accesses must have exact accesses for 99% of their launches, and no race. Exits with 1 if
a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

WORKLOAD = str(Path(__file__).with_name("sanitize_workload.py"))
PLAIN = [sys.executable, WORKLOAD]
CUDAKIT = [
    sys.executable,
    "-P",
    "-m",
    "cudakit",
    "run",
    "--sanitize",
    "-q",
    "--python",
    sys.executable,
]
ASSUMED = [*CUDAKIT, "--accesses", "arguments", "--", WORKLOAD]
# The report contains the coverage: times of runs without exact accesses would be too low.
REPORT_PATH = Path(tempfile.gettempdir()) / f"cudakit-bench-{os.getpid()}.json"
EXACT = [*CUDAKIT, "--accesses", "exact", "-f", "-o", str(REPORT_PATH), "--", WORKLOAD]
AUTO = [*CUDAKIT, "--accesses", "auto", "-f", "-o", str(REPORT_PATH), "--", WORKLOAD]

Figures: TypeAlias = dict[str, Any]

# The limits on the figures.
MAX_STEP_RATIO = 1.5
MAX_EXACT_STEP_RATIO = 3.0
MAX_EXACT_STREAM_RATIO = 12.0
MAX_AUTO_STEP_RATIO = 1.5
MAX_AUTO_STREAM_RATIO = 1.2
MIN_EXACT_SHARE = 0.99
MAX_COLD_BUILD_S, MAX_CACHED_BUILD_S = 5.0, 1.0
MAX_BUSY_STEP_RATIO = 1.7
MAX_CALLBACK_NS = 2000
MAX_START_MS = 20
MAX_LAUNCH_US = 5


def measure(command: list[str], *arguments: str) -> Figures:
    """Run the workload; return the figures that it printed, and the time of the whole process."""
    start = time.perf_counter()
    process = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{' '.join([*command, *arguments])}\n{process.stdout}{process.stderr}")
    figures: Figures = json.loads(process.stdout.splitlines()[-1])
    if command in (AUTO, EXACT):
        figures |= coverage_of(json.loads(REPORT_PATH.read_text(encoding="utf-8")))
    return figures | {"whole_s": time.perf_counter() - start}


def coverage_of(report: Figures) -> Figures:
    """Return the share of launches without exact accesses, the races, and the memory of access buffers."""
    coverage = report["coverage"]
    launches = sum(
        coverage[f"launches_{precision}"] for precision in ("exact", "assumed", "unknown")
    )
    return {
        "not_exact": 1 - coverage["launches_exact"] / max(launches, 1),
        "races": len(report["races"]),
        "arenas_bytes": coverage["arenas_bytes"],
        "from_template": coverage["launches_from_template"] / max(launches, 1),
    }


def measure_alternately(
    commands: dict[str, list[str]], rounds: int, *arguments: str
) -> dict[str, Figures]:
    """Run each command once per round, and return the median of every figure."""
    runs = [
        {name: measure(command, *arguments) for name, command in commands.items()}
        for _ in range(rounds)
    ]
    return {name: median_figures([figures[name] for figures in runs]) for name in commands}


def median_figures(runs: list[Figures]) -> Figures:
    numeric_keys = [key for key, value in runs[0].items() if isinstance(value, int | float)]
    return runs[0] | {key: statistics.median(run[key] for run in runs) for key in numeric_keys}


def measure_steps(rounds: int, *, busy: bool) -> Figures:
    arguments = ["step", "--busy"] if busy else ["step"]
    csan = [*PLAIN, "--csan"]
    commands = {"plain": PLAIN, "arguments": ASSUMED, "auto": AUTO, "exact": EXACT, "csan": csan}
    return relative_to_plain(measure_alternately(commands, rounds, *arguments))


def measure_stream_kernel(rounds: int) -> Figures:
    commands = {"plain": PLAIN, "auto": AUTO, "exact": EXACT, "csan": [*PLAIN, "--csan"]}
    return relative_to_plain(measure_alternately(commands, rounds, "stream"))


def relative_to_plain(figures: dict[str, Figures]) -> Figures:
    plain_ms = figures["plain"]["step_ms"]
    ratios = {name: run_figures["step_ms"] / plain_ms for name, run_figures in figures.items()}
    return {"runs": figures, "ratios": ratios}


def measure_recorder(rounds: int, folder: Path) -> Figures:
    """Return the time that the recorder adds to a launch, and the number of its records."""
    pairs = [
        (measure(PLAIN, "loop"), measure(PLAIN, "loop", "--record", str(folder / str(number))))
        for number in range(rounds)
    ]
    plain = median_figures([plain_run for plain_run, _ in pairs])
    recorded = median_figures([recorded_run for _, recorded_run in pairs])
    # At least one callback runs per launch, so that this is an upper bound on the time of a callback.
    return {
        "plain_ns": plain["launch_ns"],
        "recorded_ns": recorded["launch_ns"],
        "launch_ns": recorded["launch_ns"] - plain["launch_ns"],
        "records_per_launch": recorded["counts"]["written"] / recorded["launches"],
        "lost": recorded["counts"]["lost"],
    }


def measure_process_start(rounds: int) -> Figures:
    figures = measure_alternately({"plain": PLAIN, "agent": ASSUMED}, rounds, "starts")
    plain_ms, agent_ms = (figures[name]["start_ms"] for name in ("plain", "agent"))
    return {"plain_ms": plain_ms, "agent_ms": agent_ms, "more_ms": agent_ms - plain_ms}


def measure_patch_build() -> Figures:
    """Time the build of the device patch, with an empty cache and with a full one."""
    code = (
        "import json, sys, time; from pathlib import Path;"
        "from cudakit.record.device_patch import build_patch;"
        "from cudakit.gpu.compile import CompileCache;"
        "from torch.cuda import get_device_capability;"
        "capability = get_device_capability(); start = time.perf_counter();"
        "build_patch(capability, cache=CompileCache(Path(sys.argv[1])));"
        "print(json.dumps({'patch_s': time.perf_counter() - start}))"
    )
    with tempfile.TemporaryDirectory() as cache:
        cold, cached = (measure([sys.executable, "-P", "-c", code], cache) for _ in range(2))
    return {"cold_s": cold["patch_s"], "warm_s": cached["patch_s"]}


def measure_engine(folder: Path) -> Figures:
    """Record training steps, and time the engine on the trace."""
    from cudakit.sanitize.engine import Engine
    from cudakit.trace.spool import Spool

    measure(PLAIN, "step", "--record", str(folder))
    batches = list(Spool(folder).batches())
    seconds = []
    for _ in range(3):
        engine = Engine()
        start = time.perf_counter()
        races = [race for batch in batches for race in engine.feed(batch.records, batch.strings)]
        seconds.append(time.perf_counter() - start)
    launches = engine.coverage.launches
    accesses = engine.coverage.accesses_assumed + engine.coverage.accesses_exact
    return {
        "launches": launches,
        "records": sum(len(batch.records) for batch in batches),
        "accesses_per_launch": accesses / max(launches, 1),
        "us_per_launch": statistics.median(seconds) * 1e6 / max(launches, 1),
        "races": len(races),
        "gaps": dict(engine.gap_counts),
    }


def run_context() -> Figures:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {"gpu": gpu, "python": platform.python_version(), "machine": platform.machine()}


def limited_figures(figures: Figures) -> Iterator[tuple[str, float, str, float]]:
    """Yield the name, value, unit and limit of each measured figure that has a limit."""
    limits = {
        "step, arguments / plain": (("step", "ratios", "arguments"), "x", MAX_STEP_RATIO),
        "step, exact / plain": (("step", "ratios", "exact"), "x", MAX_EXACT_STEP_RATIO),
        "step, auto / plain": (("step", "ratios", "auto"), "x", MAX_AUTO_STEP_RATIO),
        "1 GB, auto / plain": (("stream", "ratios", "auto"), "x", MAX_AUTO_STREAM_RATIO),
        "1 GB, exact / plain": (("stream", "ratios", "exact"), "x", MAX_EXACT_STREAM_RATIO),
        "step, busy thread": (("busy", "ratios", "arguments"), "x", MAX_BUSY_STEP_RATIO),
        "patch, nothing cached": (("patch", "cold_s"), "s", MAX_COLD_BUILD_S),
        "patch, cached": (("patch", "warm_s"), "s", MAX_CACHED_BUILD_S),
        "step, launches not exact": (
            ("step", "runs", "exact", "not_exact"),
            "",
            1 - MIN_EXACT_SHARE,
        ),
        "1 GB, launches not exact": (
            ("stream", "runs", "exact", "not_exact"),
            "",
            1 - MIN_EXACT_SHARE,
        ),
        "step, races": (("step", "runs", "exact", "races"), "", 0),
        "1 GB, races": (("stream", "runs", "exact", "races"), "", 0),
        "recorder, a launch": (("recorder", "launch_ns"), "ns", MAX_CALLBACK_NS),
        "agent, at the start": (("start", "more_ms"), "ms", MAX_START_MS),
        "engine, a launch": (("engine", "us_per_launch"), "us", MAX_LAUNCH_US),
    }
    for name, (path, unit, limit) in limits.items():
        if path[0] in figures:
            value = figures
            for key in path:
                value = value[key]
            yield name, float(value), unit, limit  # type: ignore[arg-type]


def print_table(figures: Figures) -> bool:
    """Print the table; return whether no limit is exceeded."""
    step = f"training step of {figures['launches']['launches']} launches"
    titles = {"step": step, "stream": "a kernel over 1 GB", "busy": f"{step}, busy thread"}
    for key in filter(figures.__contains__, titles):
        print(titles[key])
        for name, run in figures[key]["runs"].items():
            ratio = figures[key]["ratios"][name]
            print(
                f"  {name:9} {run['step_ms']:9.3f} ms {ratio:6.2f} x   whole: {run['whole_s']:.1f} s"
            )
    for key in ("recorder", "start", "patch", "engine"):
        print(key, json.dumps(figures.get(key)))
    within_limits = True
    for name, value, unit, limit in limited_figures(figures):
        within_limits &= value <= limit
        verdict = "ok" if value <= limit else "EXCEEDED"
        print(f"{name:24} {value:9.2f} {unit:2}  limit {limit:7.2f} {unit:2}  {verdict}")
    return within_limits


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="measurements to make, such as step,stream,patch")
    options = parser.parse_args()
    rounds, few_rounds = options.rounds, min(options.rounds, 3)
    with tempfile.TemporaryDirectory() as folder:
        measurements: dict[str, Callable[[], Figures]] = {
            "start": lambda: measure_process_start(few_rounds),
            "engine": lambda: measure_engine(Path(folder, "trace")),
            "recorder": lambda: measure_recorder(few_rounds, Path(folder, "loops")),
            "patch": measure_patch_build,
            "step": lambda: measure_steps(rounds, busy=False),
            "stream": lambda: measure_stream_kernel(rounds),
            "busy": lambda: measure_steps(max(rounds // 2, 1), busy=True),
        }
        selected = options.only.split(",") if options.only else list(measurements)
        figures = {"run_context": run_context(), "launches": measure(PLAIN, "launches")}
        for name in selected:
            print(f"measuring: {name}", file=sys.stderr)
            figures[name] = measurements[name]()
            if options.output:
                options.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if print_table(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
