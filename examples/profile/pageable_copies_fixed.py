"""Each batch is copied from pinned memory."""

import torch

from timing import run

batch = torch.rand(16 << 20).pin_memory()
weight = torch.rand(4096, 4096, device="cuda")


def step():
    x = batch.to("cuda", non_blocking=True).view(4096, 4096)
    x @ weight


run(step)
