"""Train with a CUDA graph whose input a side stream copies; ``race`` omits the wait for the copy."""

from __future__ import annotations

import sys

import torch

STEPS, BATCH, FEATURES = 200, 256, 1024

ordered = sys.argv[1] != "race"
side, main = torch.cuda.Stream(), torch.cuda.current_stream()
hosts = [torch.randn(BATCH, FEATURES, pin_memory=True) for _ in range(4)]
inputs = torch.zeros(BATCH, FEATURES, device="cuda")
model = torch.nn.Sequential(
    torch.nn.Linear(FEATURES, 256), torch.nn.ReLU(), torch.nn.Linear(256, FEATURES)
).cuda()
optimizer = torch.optim.Adam(model.parameters(), foreach=True, capturable=True)


def step() -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = ((model(inputs * 0.5) - inputs) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


side.wait_stream(main)
with torch.cuda.stream(side):
    for _ in range(3):
        step()
main.wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()

for number in range(STEPS):
    side.wait_stream(main)
    with torch.cuda.stream(side):
        inputs.copy_(hosts[number % len(hosts)], non_blocking=True)
    if ordered:
        main.wait_stream(side)
    graph.replay()
torch.cuda.synchronize()
print(f"end: {loss.item():.4f}")
