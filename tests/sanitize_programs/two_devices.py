"""A tensor is copied from one device to another and used there; ``race`` omits the wait."""

from __future__ import annotations

import sys

import torch

ordered = sys.argv[1] != "race"
with torch.cuda.device(1):
    side = torch.cuda.Stream()
    there = torch.zeros(1 << 22, device="cuda:1")
here = torch.ones(1 << 22, device="cuda:0")
for number in range(2):
    torch.cuda.synchronize(number)

# The copy runs on the current stream of the device it comes from; torch orders that one alone.
there.copy_(here, non_blocking=True)
with torch.cuda.stream(side):
    if ordered:
        side.wait_stream(torch.cuda.default_stream(0))
        side.wait_stream(torch.cuda.default_stream(1))
    host = torch.empty(1 << 22, pin_memory=True)
    host.copy_(there, non_blocking=True)
side.synchronize()
torch.cuda.synchronize(0)
print(f"last: {host[-1]:.0f}")
