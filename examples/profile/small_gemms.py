"""64 small products run one after the other."""

import torch

from timing import run

a = torch.rand(64, 64, 64, device="cuda")
b = torch.rand(64, 64, 64, device="cuda")
c = torch.empty(64, 64, 64, device="cuda")


def step():
    for index in range(64):
        torch.mm(a[index], b[index], out=c[index])


run(step)
