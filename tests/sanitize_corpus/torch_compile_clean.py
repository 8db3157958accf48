"""A compiled function reads on a side stream what another call of it wrote, and the stream waits for that."""

import os

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch


@torch.compile
def wave(numbers, results):
    results.copy_(torch.sin(numbers) * 2)


side, main = torch.cuda.Stream(), torch.cuda.current_stream()
numbers, once, twice = (torch.ones(10_000, device="cuda") for _ in range(3))
wave(numbers, once)  # compiles it
torch.cuda.synchronize()

wave(numbers, once)
side.wait_stream(main)
with torch.cuda.stream(side):
    wave(once, twice)
torch.cuda.synchronize()
