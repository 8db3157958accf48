"""Sharded training with FSDP: torchrun --standalone --nproc-per-node 2 fsdp.py [bug]"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

STEPS = 6


def main() -> None:
    has_bug = "bug" in sys.argv[1:]
    dist.init_process_group("nccl")
    rank, rank_count = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    batch = torch.randn(32, 1024, device="cuda")
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        shard = next(model.parameters()).to_local().detach().contiguous()
        weights = torch.empty(rank_count * shard.numel(), device="cuda")
        work = dist.all_gather_into_tensor(weights, shard.flatten(), async_op=True)
        if not has_bug:
            work.wait()
        norm = weights.norm()  # WRONG with the bug: the weights may not have been gathered
        if has_bug:
            work.wait()
    print(f"rank {rank}: the norm of the first weights is {norm.item():.3f}")
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
