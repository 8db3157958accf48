"""Compare ``cudakit bench gemm`` with torch on a GPU: 12 shapes, every data type, interleaved, in one run.

    python scripts/bench_gemm.py [-o FILE.json] [--dtype LIST] [--budget SEC]

A ratio is cudakit's rate divided by torch's: the median over interleaved samples, with a 95% confidence
interval. Exits with 1 if a ratio is below 0.99.
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

from cudakit.bench.stats import ci_over_rounds

SHAPES = Path(__file__).with_name("gemm_shapes.txt")
MIN_RATIO = 0.99

_Case = dict[str, Any]


class Pair(NamedTuple):
    """The results of cudakit and of torch for the same GEMM."""

    cudakit: _Case
    torch: _Case

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
        """For each round, torch's times divided by cudakit's of the adjacent samples."""
        rounds = zip(samples_by_round(self.cudakit), samples_by_round(self.torch), strict=True)
        return [
            [torch_s / cudakit_s for cudakit_s, torch_s in zip(*samples, strict=False)]
            for samples in rounds
        ]


def samples_by_round(case: _Case) -> Iterator[list[float]]:
    begin = 0
    for count in case["rounds"] or [len(case["samples_s"])]:
        yield case["samples_s"][begin : begin + count]
        begin += count


def run_bench(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "cudakit", "bench", "gemm", *arguments, "--json"]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    result: dict[str, Any] = json.loads(process.stdout)
    if "error" in result:
        raise SystemExit(str(result["error"]))
    return result


def pairs(cases: list[_Case]) -> Iterator[Pair]:
    measured = [case for case in cases if case["median_s"] is not None]
    torch_cases = {str(case["axes"]): case for case in measured if case["contender"] == "torch"}
    for case in measured:
        if case["contender"] == "cudakit" and str(case["axes"]) in torch_cases:
            yield Pair(case, torch_cases[str(case["axes"])])


def table_row(pair: Pair) -> str:
    case, axes = pair.cudakit, pair.cudakit["axes"]
    shape = f"{axes['m']}x{axes['n']}x{axes['k']}"
    rate = case["operations"] / case["median_s"] / 1e12
    energy = case["energy_j"]
    energy_text = "-" if energy is None else f"{energy / case['operations'] * 1e12:.2f}"
    limit = case["ratio_to_limit"]
    return (
        f"{axes['dtype']:9} {shape:20} {rate:8.1f} {'-' if limit is None else format(limit, '.0%'):>5} "
        f"{pair.ratio:7.4f} {pair.half_width:7.4f} {energy_text:>7}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--dtype", default="fp64,fp32,tf32,fp16,bf16,fp8_e4m3,int8")
    parser.add_argument("--budget", default="300")
    options = parser.parse_args()
    arguments = ["--shapes", str(SHAPES), "--dtype", options.dtype, "--budget", options.budget]
    result = run_bench([*arguments, "--vs", "torch"])
    if options.output:
        options.output.write_text(json.dumps(result) + "\n")
    compared_pairs = [*pairs(result["results"])]
    print(
        f"{'type':9} {'m x n x k':20} {'TFLOP/s':>8} {'peak':>5} {'ratio':>7} {'±':>7} {'pJ/op':>7}"
    )
    for pair in compared_pairs:
        print(table_row(pair))
    for case in result["results"]:
        if case["median_s"] is None:
            print("not run:", case["contender"], case["axes"], case["unavailable"]["median_s"])
    lowest_ratio = min(pair.ratio for pair in compared_pairs)
    print(f"worst ratio {lowest_ratio:.4f} of {len(compared_pairs)}; the minimum is {MIN_RATIO}")
    return int(lowest_ratio < MIN_RATIO)


if __name__ == "__main__":
    sys.exit(main())
