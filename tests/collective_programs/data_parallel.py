"""Data-parallel training: torchrun --standalone --nproc-per-node 2 data_parallel.py [bug]"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

STEPS, ELEMENTS = 8, 1 << 20


def train(rank: int, *, has_bug: bool) -> None:
    """Train a model on this rank's GPU, and sum a tensor over the ranks in each step."""
    torch.cuda.set_device(rank)
    layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
    model = torch.nn.parallel.DistributedDataParallel(layers, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, total = torch.randn(64, 512, device="cuda"), torch.zeros(ELEMENTS, device="cuda")
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        part = torch.full((ELEMENTS,), float(rank), device="cuda")
        work = dist.all_reduce(part, async_op=True)
        if not has_bug:
            work.wait()
        total += part  # WRONG with the bug: the all-reduce may not have ended
        if has_bug:
            work.wait()
        torch.cuda.synchronize()
    print(f"rank {rank}: {total[0].item()}, expected {float(STEPS)}")


if __name__ == "__main__":
    dist.init_process_group("nccl")
    train(dist.get_rank(), has_bug="bug" in sys.argv[1:])
    dist.destroy_process_group()
