"""The input of a CUDA graph is overwritten on a side stream after the replay that reads it."""

import torch

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
host = torch.ones(1 << 22, pin_memory=True)
static_input = torch.zeros(1 << 22, device="cuda")

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    output = (static_input * 2).sum()
graph.replay()

side.wait_stream(main)
with torch.cuda.stream(side):
    static_input.copy_(host, non_blocking=True)

main.wait_stream(side)
graph.replay()
print(f"sum: {output.item():.0f}")
