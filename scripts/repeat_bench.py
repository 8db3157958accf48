"""Repeat a bench in separate processes, and check that runs agree within their confidence intervals.

    python scripts/repeat_bench.py [--pairs N] [-o FILE.json] -- gemm 4096 --dtype bf16 ...

Two runs agree if their medians differ by at most the root of the sum of squares of the half-widths of their
confidence intervals. Exits with 1 if fewer than nine of ten pairs agree, or two runs differ by more than 1%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

MIN_AGREEING = 0.9
MAX_DIFFERENCE = 0.01

_Result = dict[str, Any]


class Figure(NamedTuple):
    """The median of a case in one run, and the half-width of its CI."""

    median_s: float
    half_width_s: float


def run(arguments: list[str]) -> _Result:
    command = [sys.executable, "-P", "-m", "cudakit", "bench", *arguments, "--json", "-q"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{process.stdout[-2000:]}{process.stderr}")
    result: _Result = json.loads(process.stdout)
    return result


def figures(result: _Result) -> dict[str, Figure]:
    return {
        " ".join(
            [
                case["contender"],
                case["name"],
                *(f"{axis}={value}" for axis, value in case["axes"].items()),
            ]
        ): (Figure(case["median_s"], (case["ci95_s"][1] - case["ci95_s"][0]) / 2))
        for case in result["results"]
        if case["median_s"] is not None
    }


def agreement(runs: list[Figure]) -> dict[str, float]:
    """Return how well runs agree, over disjoint pairs of consecutive runs."""
    pairs = [*zip(runs[::2], runs[1::2], strict=False)]
    agree = [
        abs(a.median_s - b.median_s) <= (a.half_width_s**2 + b.half_width_s**2) ** 0.5
        for a, b in pairs
    ]
    medians = [run.median_s for run in runs]
    median_s = statistics.median(medians)
    return {
        "pairs": len(pairs),
        "agreeing": sum(agree) / len(agree),
        "spread": (max(medians) - min(medians)) / median_s,
        "largest_difference": max(abs(a.median_s - b.median_s) for a, b in pairs) / median_s,
        "half_width": statistics.median(run.half_width_s for run in runs) / median_s,
        "median_s": median_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("bench", nargs="+", help="a bench and its options, after --")
    options = parser.parse_args()
    runs = [figures(run(options.bench)) for _ in range(2 * options.pairs)]
    agreements = {name: agreement([run[name] for run in runs if name in run]) for name in runs[0]}
    if options.output:
        options.output.write_text(json.dumps(agreements, indent=2) + "\n")
    print(f"{'median':>12} {'±':>7} {'spread':>7} {'pair':>7} {'agree':>6}  case")
    for name, row in agreements.items():
        print(
            f"{row['median_s'] * 1e6:9.2f} us {row['half_width']:7.3%} {row['spread']:7.3%} "
            f"{row['largest_difference']:7.3%} {row['agreeing']:6.0%}  {name}"
        )
    failures = [
        row["agreeing"] < MIN_AGREEING or row["largest_difference"] > MAX_DIFFERENCE
        for row in agreements.values()
    ]
    return int(any(failures))


if __name__ == "__main__":
    sys.exit(main())
