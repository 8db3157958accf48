"""Compare ``cudakit bench gemm`` with torch on a GPU: 12 shapes, every data type, interleaved, in one run.

    python scripts/bench_gemm.py [-o FILE.json] [--dtype LIST] [--budget SEC]

A ratio is cudakit's rate divided by torch's: the median of interleaved samples with its 95% CI over rounds.
Exits with 1 if a ratio is below 0.99.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cudakit.core.bench.stats import ci_over_rounds

SHAPES = Path(__file__).with_name("gemm_shapes.txt")
MIN_RATIO = 0.99

_Case = dict[str, Any]


class Pair(NamedTuple):
    """The same GEMM by cudakit and by torch."""

    own: _Case
    baseline: _Case

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def half_width(self) -> float:
        low, high = ci_over_rounds(self.ratios, [len(ratios) for ratios in self.rounds])
        return (high - low) / 2

    @property
    def ratios(self) -> list[float]:
        return [ratio for ratios in self.rounds for ratio in ratios]

    @property
    def rounds(self) -> list[list[float]]:
        """Per round, torch's time divided by cudakit's in adjacent samples."""
        each = zip(in_rounds(self.own), in_rounds(self.baseline), strict=True)
        return [[b / o for o, b in zip(own, other, strict=False)] for own, other in each]


def in_rounds(case: _Case) -> Iterator[list[float]]:
    begin = 0
    for count in case["rounds"] or [len(case["samples_s"])]:
        yield case["samples_s"][begin : begin + count]
        begin += count


def measure(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "cudakit", "bench", "gemm", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    result: dict[str, Any] = json.loads(done.stdout)
    if "error" in result:
        raise SystemExit(str(result["error"]))
    return result


def pairs(cases: list[_Case]) -> Iterator[Pair]:
    known = [case for case in cases if case["median_s"] is not None]
    baselines = {str(case["axes"]): case for case in known if case["contender"] == "torch"}
    for case in known:
        if case["contender"] == "cudakit" and str(case["axes"]) in baselines:
            yield Pair(case, baselines[str(case["axes"])])


def line(pair: Pair) -> str:
    case, axes = pair.own, pair.own["axes"]
    shape = f"{axes['m']}x{axes['n']}x{axes['k']}"
    rate = case["operations"] / case["median_s"] / 1e12
    energy = case["energy_j"]
    cost = "-" if energy is None else f"{energy / case['operations'] * 1e12:.2f}"
    limit = case["ratio_to_limit"]
    return (
        f"{axes['dtype']:9} {shape:20} {rate:8.1f} {'-' if limit is None else format(limit, '.0%'):>5} "
        f"{pair.ratio:7.4f} {pair.half_width:7.4f} {cost:>7}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--dtype", default="fp64,fp32,tf32,fp16,bf16,fp8_e4m3,int8")
    parser.add_argument("--budget", default="300")
    options = parser.parse_args()
    arguments = ["--shapes", str(SHAPES), "--dtype", options.dtype, "--budget", options.budget]
    result = measure([*arguments, "--vs", "torch"])
    if options.output:
        options.output.write_text(json.dumps(result) + "\n")
    compared = [*pairs(result["results"])]
    print(
        f"{'type':9} {'m x n x k':20} {'TFLOP/s':>8} {'peak':>5} {'ratio':>7} {'±':>7} {'pJ/op':>7}"
    )
    for pair in compared:
        print(line(pair))
    for case in result["results"]:
        if case["median_s"] is None:
            print("not run:", case["contender"], case["axes"], case["unavailable"]["median_s"])
    worst = min(pair.ratio for pair in compared)
    print(f"worst ratio {worst:.4f} of {len(compared)}; the minimum is {MIN_RATIO}")
    return int(worst < MIN_RATIO)


if __name__ == "__main__":
    sys.exit(main())
