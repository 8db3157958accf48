"""race: A kernel on a side stream modifies the input of a graph while a replay may read it.

fixed: A kernel on a side stream modifies the input of a graph between two replays, ordered with both.
"""

import sys

import torch

race = sys.argv[1] == "race"

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
numbers = torch.ones(10_000, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    doubled = numbers * 2
graph.replay()
if not race:
    side.wait_stream(main)
with torch.cuda.stream(side):
    # WRONG if race: the side stream has not waited for the replay.
    numbers.add_(1)
main.wait_stream(side)
graph.replay()
torch.cuda.synchronize()
