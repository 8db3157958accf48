"""The workload of scripts/bench_sanitize.py, run plain and under cudakit; prints one line of JSON.

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

STEPS_AT_ONCE, BLOCKS, WARM_UP = 20, 15, 20
BUSY_STEPS_AT_ONCE = 2  # each call waits for the GIL then, and a step takes 0.2 s
MOST_SECONDS, LEAST_BLOCKS = 8, 3
LOOP_LAUNCHES = 20_000
STREAM_TIMES = 15
STARTS = 40


def training_step() -> Callable[[], None]:
    """Return a training step of a small model, with about 19 launches."""
    import torch

    torch.manual_seed(0)
    last = torch.nn.Linear(512, 10, bias=False)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), last).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    inputs = torch.randn(256, 512, device="cuda")
    wanted = torch.randn(256, 10, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()

    return step


def step_times(*, busy: bool) -> dict[str, Any]:
    import torch

    step = training_step()
    repeat(step, WARM_UP)
    torch.cuda.synchronize()
    done = threading.Event()
    if busy:
        threading.Thread(target=spin, args=(done,), daemon=True).start()
    steps = BUSY_STEPS_AT_ONCE if busy else STEPS_AT_ONCE
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < LEAST_BLOCKS or (
        len(times) < BLOCKS and time.perf_counter() - begin < MOST_SECONDS
    ):
        start = time.perf_counter()
        repeat(step, steps)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / steps)
    done.set()
    return {"step_ms": statistics.median(times), "least_ms": min(times), "blocks": len(times)}


def stream_times() -> dict[str, Any]:
    """Time an in-place addition to 1 GB: a memory-bound kernel that reads and writes all of it."""
    import torch

    numbers = torch.zeros(1 << 28, device="cuda")
    repeat(lambda: numbers.add_(1), 2)
    torch.cuda.synchronize()
    times = []
    for _ in range(STREAM_TIMES):
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


def spin(done: threading.Event) -> None:
    """Keep the interpreter busy, like a thread that prepares data in Python."""
    while not done.is_set():
        sum(range(1000))


def kernels_of_a_step() -> dict[str, Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    step = training_step()
    repeat(step, WARM_UP)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    on_device = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    memory = [e for e in on_device if e.name.startswith(("Memcpy", "Memset"))]
    return {"launches": len(on_device) - len(memory), "copies_and_fills": len(memory)}


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


def recorder_into(directory: Path) -> Any:
    """Start the recorder in this process before CUDA is initialized, as the agent does."""
    from cudakit.gpu.capture.installed import SearchPaths, find_sanitizer_library

    recorder = import_module("cudakit.gpu.capture._recorder")
    try:
        walker = import_module("cudakit.gpu.capture._frames").walker
    except ImportError:
        walker = 0
    directory.mkdir(parents=True, exist_ok=True)
    recorder.start(
        str(directory), str(find_sanitizer_library(SearchPaths.of_this_process()).path), walker
    )
    return recorder


def start_times() -> dict[str, Any]:
    """Time processes that do nothing, in the environment of this one."""
    times = []
    for _ in range(STARTS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        times.append((time.perf_counter() - start) * 1e3)
    return {"start_ms": statistics.median(times), "least_ms": min(times)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["step", "stream", "launches", "loop", "starts"])
    parser.add_argument("--csan", action="store_true")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    recorder = recorder_into(options.record) if options.record else None
    if options.csan:
        import_module("torch.cuda._sanitizer").enable_cuda_sanitizer()
    doing: dict[str, Callable[[], dict[str, Any]]] = {
        "step": lambda: step_times(busy=options.busy),
        "stream": stream_times,
        "launches": kernels_of_a_step,
        "loop": lambda: loop_times(recorder),
        "starts": start_times,
    }
    print(json.dumps(doing[options.what]()), flush=True)
    if recorder:
        recorder.stop()


if __name__ == "__main__":
    main()
