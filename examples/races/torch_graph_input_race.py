"""The input of a CUDA graph is overwritten on a side stream while the graph may still read it.

The kernels of a replay run in the stream that it was launched in. The input for the next replay comes on
another stream, which has not been told to wait for them.
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
    # WRONG: the replay may still be reading.
    static_input.copy_(host, non_blocking=True)

main.wait_stream(side)
graph.replay()
print(f"sum: {output.item():.0f}")
