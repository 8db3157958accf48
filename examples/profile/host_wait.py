"""The loss is read after every layer: the GPU is idle until Python has launched the next one."""

import torch

from timing import run

x = torch.rand(1024, 1024, device="cuda")
weight = torch.rand(1024, 1024, device="cuda") / 1024


def step():
    y, total = x, 0.0
    for _ in range(20):
        y = torch.relu(y @ weight)
        total += y.mean().item()


run(step)
