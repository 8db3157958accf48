"""The same step as one CUDA graph."""

import torch

from timing import run

x = torch.rand(64, 64, device="cuda")
weight = torch.rand(64, 64, device="cuda") / 64


def step():
    y = x
    for _ in range(100):
        y = torch.relu(y @ weight) + x


step()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()

run(graph.replay)
