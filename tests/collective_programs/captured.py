"""An all-reduce in a CUDA graph: torchrun --standalone --nproc-per-node 2 captured.py [bug]"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

REPLAYS, ELEMENTS = 4, 1 << 20


def main() -> None:
    has_bug = "bug" in sys.argv[1:]
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    part, side = torch.ones(ELEMENTS, device="cuda"), torch.cuda.Stream()
    dist.all_reduce(part)  # the first collective creates the communicator
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        part.fill_(1.0)
        dist.all_reduce(part)
    for _ in range(REPLAYS):
        with torch.cuda.stream(side):
            graph.replay()
        if not has_bug:
            torch.cuda.current_stream().wait_stream(side)
        total = part.sum()  # WRONG with the bug: the graph may not have ended
        torch.cuda.synchronize()
    print(f"rank {rank}: {total.item()}, expected {2.0 * ELEMENTS}")
    del graph  # NCCL waits for the graphs of a communicator before it destroys the communicator
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
