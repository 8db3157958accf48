"""Compare results of ``cudakit bench`` with those of tools that share no code with cudakit, on a GPU.

    python scripts/crosscheck_bench.py [-o FILE.json] [--only memory,copy,launch,alloc,graph,torch]

The tools are crosscheck.cu, which is CUDA C++ with events of the runtime, compiled by nvcc; and torch, with
torch's kernels and events. The ratio is that of the medians. Host latencies differ by the time that Python
takes, which is no error.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).with_name("crosscheck.cu")
GIB = 1 << 30

# The options of each bench.
BENCHES = {
    "memory": [
        "--operations",
        "copy,triad",
        "--sizes",
        "1GiB",
        "--cache",
        "rotate",
        "--mode",
        "isolated",
    ],
    "copy": ["--directions", "d2d,h2d,d2h", "--sizes", "1GiB", "--timeout", "4"],
    "pageable": [
        "--directions",
        "pageable-h2d,pageable-d2h",
        "--sizes",
        "256MiB",
        "--timeout",
        "4",
    ],
    "launch": ["--calls", "launch,launch-to-finish,launch-back-to-back,event-record"],
    "alloc": ["--sizes", "1MiB"],
    "graph": ["--topologies", "chain", "--nodes", "1,100,1000", "--steps", "launch,run,replay"],
}


class Check(NamedTuple):
    """A time measured by cudakit and by another tool."""

    case: str  # The name of the case in crosscheck.cu.
    cudakit_s: float
    tool: str
    tool_s: float

    @property
    def ratio(self) -> float:
        return self.cudakit_s / self.tool_s if self.tool_s else float("nan")


def name_of(case: dict[str, Any]) -> str:
    """Return the name of a case in crosscheck.cu."""
    axes, name = case["axes"], case["name"]
    size = axes.get("size_bytes", 0)
    size_text = f"{size // GIB}GiB" if size >= GIB else f"{size >> 20}MiB"
    match name:
        case "memory":
            return f"memory {axes['operation']} {size_text}"
        case "copy":
            return f"copy {axes['direction']} {size_text}"
        case "alloc":
            return f"alloc {axes['allocator']} {size_text}"
        case "graph":
            return f"graph {axes['step']} {axes['nodes']}"
    return str(axes.get("call", name))


def measure_by_cudakit(only: set[str]) -> dict[str, float]:
    medians_s: dict[str, float] = {}
    for bench, options in BENCHES.items():
        if bench not in only:
            continue
        command = "copy" if bench == "pageable" else bench
        command_line = [
            sys.executable,
            "-P",
            "-m",
            "cudakit",
            "bench",
            command,
            *options,
            "--json",
            "-q",
        ]
        process = subprocess.run(command_line, capture_output=True, text=True, check=False)
        if process.returncode:
            print(
                f"{' '.join(command_line)}\n{process.stdout[-500:]}{process.stderr}",
                file=sys.stderr,
            )
            continue
        for case in json.loads(process.stdout)["results"]:
            if case["median_s"] is not None:
                medians_s[name_of(case)] = case["median_s"]
    return medians_s


def measure_by_cuda() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        program = str(Path(directory) / "crosscheck")
        compiler = shutil.which("nvcc") or sys.exit("nvcc is not on the PATH")
        subprocess.run([compiler, "-O3", "-arch=native", "-o", program, str(SOURCE)], check=True)
        process = subprocess.run([program], capture_output=True, text=True, check=True)
    rows = (line.split("\t") for line in process.stdout.splitlines())
    return {name: float(seconds) for name, seconds in rows}


def measure_by_torch() -> dict[str, float]:
    """Time torch's kernels with torch's events. A sleep kernel hides the time of the launches."""
    import torch

    count = GIB // 4
    x, y, z = (torch.rand(count, device="cuda") for _ in range(3))
    host = torch.rand(count).pin_memory()
    return {
        "memory copy 1GiB": _time_by_events(torch, lambda: torch.mul(y, 1.7, out=x)),
        "memory triad 1GiB": _time_by_events(torch, lambda: torch.add(y, z, alpha=1.7, out=x)),
        "copy d2d 1GiB": _time_by_events(torch, lambda: x.copy_(y)),
        "copy h2d 1GiB": _time_by_events(torch, lambda: x.copy_(host, non_blocking=True), 20),
        "copy d2h 1GiB": _time_by_events(torch, lambda: host.copy_(x, non_blocking=True), 20),
    }


def _time_by_events(torch: Any, work: Callable[[], object], samples: int = 200) -> float:
    times = []
    for sample in range(-10, samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(400_000)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if sample >= 0:
            times.append(begin.elapsed_time(end) * 1e-3)
    return sorted(times)[len(times) // 2]


def checks(only: set[str]) -> Iterator[Check]:
    cudakit_times = measure_by_cudakit(only)
    tool_times = {
        "CUDA C++": measure_by_cuda(),
        "torch": measure_by_torch() if "torch" in only else {},
    }
    for case, seconds in cudakit_times.items():
        for tool, times in tool_times.items():
            if case in times:
                yield Check(case, seconds, tool, times[case])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", default=",".join([*BENCHES, "torch"]))
    options = parser.parse_args()
    results = [*checks(set(options.only.split(",")))]
    if options.output:
        rows = [check._asdict() | {"ratio": check.ratio} for check in results]
        options.output.write_text(json.dumps(rows, indent=2) + "\n")
    print(f"{'cudakit':>12} {'tool':>12} {'ratio':>7}  tool      case")
    for check in results:
        print(
            f"{check.cudakit_s * 1e6:9.2f} us {check.tool_s * 1e6:9.2f} us {check.ratio:7.4f}  "
            f"{check.tool:9} {check.case}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
