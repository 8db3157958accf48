"""Run the steps of an example, and print the median time of a step."""

import statistics
import time

import torch

STEPS = 60
WARM_UP = 10
GROUP = 5


def run(step, batches=None):
    """Call ``step`` once for each batch; print the median time of a step, over groups of steps."""
    source = iter(batches) if batches is not None else iter(range(STEPS))
    times = []
    begin = time.perf_counter()
    for number in range(STEPS):
        batch = next(source)
        with torch.cuda.nvtx.range("step"):
            step(batch) if batches is not None else step()
        if number % GROUP == GROUP - 1:
            torch.cuda.synchronize()
            end = time.perf_counter()
            if number >= WARM_UP:
                times.append((end - begin) / GROUP)
            begin = end
    print(f"{statistics.median(times) * 1e3:.4f} ms per step")
