"""Run a workload of scripts/bench_sanitize.py, which starts this script with and without cudakit; print JSON.

    python scripts/sanitize_workload.py step [--csan] [--busy]   # time of a training step, ms
    python scripts/sanitize_workload.py stream [--csan]          # time of a kernel over 1 GB, ms
    python scripts/sanitize_workload.py launches                 # number of launches in a step
    python scripts/sanitize_workload.py loop [--record DIR]      # time of a launch in a launch-bound loop, ns
    python scripts/sanitize_workload.py starts                   # time of ``python -c pass``, ms

``--record`` starts the recorder in this process; nothing reads the trace.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

BLOCK_STEPS, MAX_BLOCKS, WARM_UP_STEPS = 20, 15, 20  # The steps of a block are timed together.
BUSY_BLOCK_STEPS = 2  # With a busy thread each call waits for the GIL, and a step takes 0.2 s.
MAX_SECONDS, MIN_BLOCKS = 8, 3
LOOP_LAUNCHES = 20_000
STREAM_RUNS = 15
PROCESS_STARTS = 40


def training_step() -> Callable[[], None]:
    """Return a training step of a small model, with about 19 launches."""
    import torch

    torch.manual_seed(0)
    last = torch.nn.Linear(512, 10, bias=False)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), last).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    inputs = torch.randn(256, 512, device="cuda")
    targets = torch.randn(256, 10, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def step_times(*, busy: bool) -> dict[str, Any]:
    import torch

    step = training_step()
    repeat(step, WARM_UP_STEPS)
    torch.cuda.synchronize()
    stop = threading.Event()
    if busy:
        threading.Thread(target=spin, args=(stop,), daemon=True).start()
    steps = BUSY_BLOCK_STEPS if busy else BLOCK_STEPS
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < MIN_BLOCKS or (
        len(times) < MAX_BLOCKS and time.perf_counter() - begin < MAX_SECONDS
    ):
        start = time.perf_counter()
        repeat(step, steps)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / steps)
    stop.set()
    return {"step_ms": statistics.median(times), "least_ms": min(times), "blocks": len(times)}


def stream_times() -> dict[str, Any]:
    """Time an in-place addition to 1 GB: a memory-bound kernel that reads and writes each byte once."""
    import torch

    numbers = torch.zeros(1 << 28, device="cuda")
    repeat(lambda: numbers.add_(1), 2)
    torch.cuda.synchronize()
    times = []
    for _ in range(STREAM_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        numbers.add_(1)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return {"step_ms": statistics.median(times), "least_ms": min(times), "blocks": len(times)}


def repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


def spin(stop: threading.Event) -> None:
    """Keep the interpreter busy until ``stop`` is set, like a thread that prepares data in Python."""
    while not stop.is_set():
        sum(range(1000))


def count_launches_of_step() -> dict[str, Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    step = training_step()
    repeat(step, WARM_UP_STEPS)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profile_result:
        step()
        torch.cuda.synchronize()
    device_events = [
        event
        for event in profile_result.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    copies_and_fills = sum(event.name.startswith(("Memcpy", "Memset")) for event in device_events)
    return {
        "launches": len(device_events) - copies_and_fills,
        "copies_and_fills": copies_and_fills,
    }


def loop_times(recorder: Any) -> dict[str, Any]:
    """Time launches of a kernel so small that the GPU finishes it before the next launch."""
    import torch

    number = torch.zeros(1, device="cuda")
    add = number.add_
    repeat(lambda: add(1), LOOP_LAUNCHES // 10)
    torch.cuda.synchronize()
    before = dict(recorder.counts()) if recorder else {}
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(LOOP_LAUNCHES):
            add(1)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e9 / LOOP_LAUNCHES)
    after = dict(recorder.counts()) if recorder else {}
    counts = {key: after[key] - before[key] for key in after}
    return {"launch_ns": statistics.median(times), "launches": 5 * LOOP_LAUNCHES, "counts": counts}


def start_recorder(directory: Path) -> Any:
    """Start the recorder in this process before CUDA is initialized, as cudakit's agent does."""
    from cudakit.record.installed import SearchPaths, find_sanitizer_library

    recorder = import_module("cudakit.record._recorder")
    try:
        walker = import_module("cudakit.record._frames").walker
    except ImportError:
        walker = 0
    directory.mkdir(parents=True, exist_ok=True)
    recorder.start(
        str(directory), str(find_sanitizer_library(SearchPaths.of_this_process()).path), walker
    )
    return recorder


def start_times() -> dict[str, Any]:
    """Time processes that run an empty program in the environment of this process."""
    times = []
    for _ in range(PROCESS_STARTS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        times.append((time.perf_counter() - start) * 1e3)
    return {"start_ms": statistics.median(times), "least_ms": min(times)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=["step", "stream", "launches", "loop", "starts"])
    parser.add_argument("--csan", action="store_true")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    recorder = start_recorder(options.record) if options.record else None
    if options.csan:
        import_module("torch.cuda._sanitizer").enable_cuda_sanitizer()
    workloads: dict[str, Callable[[], dict[str, Any]]] = {
        "step": lambda: step_times(busy=options.busy),
        "stream": stream_times,
        "launches": count_launches_of_step,
        "loop": lambda: loop_times(recorder),
        "starts": start_times,
    }
    print(json.dumps(workloads[options.workload]()), flush=True)
    if recorder:
        recorder.stop()


if __name__ == "__main__":
    main()
