"""Prefetch into expandable segments of torch; ``race`` omits the wait for the copy."""

from __future__ import annotations

import os
import sys

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch

ordered = sys.argv[1] != "race"
side, main = torch.cuda.Stream(), torch.cuda.current_stream()
for size in (1 << 20, 1 << 24, 1 << 26):
    host = torch.ones(size, pin_memory=True)
    with torch.cuda.stream(side):
        batch = host.to("cuda", non_blocking=True)
    if ordered:
        main.wait_stream(side)
    batch.record_stream(main)
    print(f"sum: {(batch * 2).sum().item():.0f}")
    del batch
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
