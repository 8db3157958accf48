"""The input of a CUDA graph is overwritten on a side stream while a replay may still read it.

A replay runs on the stream that launched it. The side stream, which copies the next input, does not wait for
the replay.
"""

import torch

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
host = torch.ones(1 << 22, pin_memory=True)
static_input = torch.zeros(1 << 22, device="cuda")

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    output = (static_input * 2).sum()
graph.replay()

with torch.cuda.stream(side):
    # WRONG: the replay may still be reading the input.
    static_input.copy_(host, non_blocking=True)

main.wait_stream(side)
graph.replay()
print(f"sum: {output.item():.0f}")
