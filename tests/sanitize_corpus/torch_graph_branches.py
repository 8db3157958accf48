"""race: Two branches of a graph modify overlapping parts of one tensor.

fixed: Two branches of a graph modify the two halves of one tensor, and a later step all of it.
"""

import sys

import torch

race = sys.argv[1] == "race"

side = torch.cuda.Stream()
numbers = torch.ones(10_000, device="cuda")
# WRONG if race: nothing orders the accesses to the shared element
low, high = numbers[:5000], numbers[(4999 if race else 5000) :]
for part in (low, high):
    part.add_(1).mul_(2)
torch.cuda.synchronize()

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        low.add_(1)
    high.mul_(2)
    main.wait_stream(side)
    numbers.add_(3)
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()
