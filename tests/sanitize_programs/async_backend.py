"""Use stream-ordered memory of torch on another stream; ``race`` omits the wait for the allocation."""

from __future__ import annotations

import os
import sys

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"

import torch

ordered = sys.argv[1] != "race"
side, main = torch.cuda.Stream(), torch.cuda.current_stream()
host = torch.ones(1 << 22, pin_memory=True)
for _ in range(20):
    with torch.cuda.stream(side):
        batch = torch.empty(1 << 22, device="cuda")
    if ordered:
        main.wait_stream(side)
    batch.record_stream(main)
    batch.copy_(host, non_blocking=True)
    total = batch.sum()
    del batch
torch.cuda.synchronize()
print(f"sum: {total.item():.0f}")
