"""Compare ``cudakit bench gemm`` with torch on a GPU: 12 shapes, every type, five rounds in turn, one run.

    python scripts/bench_gemm.py [-o FILE.json] [--dtype LIST] [--budget SEC]

A ratio is cudakit's rate over torch's: the median over samples that followed one another, in one process on
random data, with its 95 % interval over the rounds. Exits with 1 where one is below 0.99.
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
LEAST_RATIO = 0.99

_Case = dict[str, Any]


class Pair(NamedTuple):
    """The same product by cudakit and by torch."""

    own: _Case
    peer: _Case

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def half_width(self) -> float:
        low, high = ci_over_rounds(self.ratios, [len(each) for each in self.rounds])
        return (high - low) / 2

    @property
    def ratios(self) -> list[float]:
        return [ratio for each in self.rounds for ratio in each]

    @property
    def rounds(self) -> list[list[float]]:
        """Of each round, torch's time over ours in samples that followed one another."""
        each = zip(in_rounds(self.own), in_rounds(self.peer), strict=True)
        return [[p / o for o, p in zip(own, peer, strict=False)] for own, peer in each]


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
    peers = {str(case["axes"]): case for case in known if case["library"] == "torch"}
    for case in known:
        if case["library"] == "cudakit" and str(case["axes"]) in peers:
            yield Pair(case, peers[str(case["axes"])])


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
    asked = ["--shapes", str(SHAPES), "--dtype", options.dtype, "--budget", options.budget]
    result = measure([*asked, "--vs", "torch"])
    if options.output:
        options.output.write_text(json.dumps(result) + "\n")
    found = [*pairs(result["results"])]
    print(
        f"{'type':9} {'m x n x k':20} {'TFLOP/s':>8} {'limit':>5} {'ratio':>7} {'±':>7} {'pJ/op':>7}"
    )
    for pair in found:
        print(line(pair))
    for case in result["results"]:
        if case["median_s"] is None:
            print("no figure:", case["library"], case["axes"], case["unavailable"]["median_s"])
    worst = min(pair.ratio for pair in found)
    print(f"worst ratio {worst:.4f} of {len(found)}; at least {LEAST_RATIO} is wanted")
    return int(worst < LEAST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
