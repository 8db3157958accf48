"""Train on two GPUs with data parallelism, and reduce a tensor after each step.

cudakit run --profile --log ddp.plog torchrun --standalone --nproc-per-node 2 ddp.py
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    steps = 40
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    layers = [torch.nn.Linear(1024, 1024) for _ in range(8)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), bucket_cap_mb=8)
    optimizer = torch.optim.AdamW(model.parameters())
    x, total = torch.randn(64, 1024, device="cuda"), torch.zeros(1 << 20, device="cuda")
    times_s = []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        part = torch.full((1 << 20,), float(rank), device="cuda")
        work = dist.all_reduce(part, async_op=True)
        # The stream waits for the collective; the host continues.
        work.wait()
        total += part
        # The next step begins after this step
        # has ended on the GPU.
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start)
    if rank == 0:
        print(f"{sorted(times_s)[steps // 2] * 1e3:.3f} ms per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
