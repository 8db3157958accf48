"""Measure the cost of ``cudakit run --profile`` on a GPU: against plain Python and torch.profiler.

    python scripts/bench_profile_cost.py [--rounds N] [-o FILE.json]

Each process trains a small model, so that launches take most of its time, and prints the median time of a
step. The processes of a round alternate: plain, profiled with call stacks, with torch.profiler (CUDA activity
without stacks), and after the end of a profile (``--duration``). Prints the medians over the rounds, in ms
and as multiples of plain. Needs torch and a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_UP_STEPS, STEPS = 20, 100
AFTER_SECONDS = 2.5  # the profile of 1 s has ended after this time
MODES = ("plain", "profiled", "torch.profiler", "after")
WORKLOADS = ("mlp", "lstm", "graph")


def training_step(workload: str) -> Callable[[], object]:
    """Return a function that trains a model for one step: layers, an LSTM, or layers in a CUDA graph."""
    import torch

    if workload == "lstm":
        model: Any = torch.nn.LSTM(128, 128, 2).cuda()
    else:
        layers = [torch.nn.Linear(256, 256) for _ in range(24)]
        model = torch.nn.Sequential(
            *(each for layer in layers for each in (layer, torch.nn.GELU()))
        )
        model = model.cuda()
    data = torch.randn(32, 16, 128 if workload == "lstm" else 256, device="cuda")
    if workload == "graph":
        model = torch.cuda.make_graphed_callables(model, (data,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        output = model(data)
        (output[0] if workload == "lstm" else output).square().mean().backward()
        optimizer.step()

    return step


def median_step_ms(step: Callable[[], object]) -> float:
    import torch

    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def run_workload(workload: str, mode: str) -> None:
    """Print the median time of a step in this process."""
    import torch

    step = training_step(workload)
    begin = time.perf_counter()
    for _ in range(WARM_UP_STEPS):
        step()
    while mode == "after" and time.perf_counter() - begin < AFTER_SECONDS:
        step()
    torch.cuda.synchronize()
    if mode == "torch.profiler":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
            print(median_step_ms(step), flush=True)
    else:
        print(median_step_ms(step), flush=True)


def measure(workload: str, mode: str) -> float:
    """Return the median time of a step, in ms, of a new process."""
    cudakit = [sys.executable, "-P", "-m", "cudakit", "run", "--profile", "-q"]
    prefix = {"profiled": cudakit, "after": [*cudakit, "--duration", "1"]}.get(
        mode, [sys.executable]
    )
    command = [*prefix, __file__, "--workload", workload, "--mode", mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure all workloads, or run one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--workload", choices=WORKLOADS, help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.workload:
        return run_workload(options.workload, options.mode)
    result: dict[str, dict[str, float]] = {}
    for workload in WORKLOADS:
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(options.rounds):
            for mode in MODES:
                times[mode].append(measure(workload, mode))
        medians = {mode: statistics.median(times[mode]) for mode in MODES}
        result[workload] = medians
        for mode, median in medians.items():
            print(
                f"{workload:6} {mode:15} {median:8.3f} ms  {median / medians['plain']:.2f}",
                flush=True,
            )
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
