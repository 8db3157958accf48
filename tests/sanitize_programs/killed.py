"""The program is killed by a signal; with ``race``, after a race, which must be reported."""

from __future__ import annotations

import os
import signal
import sys

import torch

ordered = sys.argv[1] != "race"
side = torch.cuda.Stream()
host = torch.ones(1 << 20, pin_memory=True)
with torch.cuda.stream(side):
    batch = host.to("cuda", non_blocking=True)
if ordered:
    torch.cuda.current_stream().wait_stream(side)
print(f"sum: {(batch * 2).sum().item():.0f}", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
