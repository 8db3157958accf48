"""Two ranks that call different collectives: torchrun --standalone --nproc-per-node 2 different_calls.py HOW

HOW is ``same``, ``order``, ``count``, ``type``, ``root`` or ``died``; with ``died``, rank 1 ends before the calls.
NCCL may wait forever for calls that differ, so the program ends without waiting for the GPU.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    how = sys.argv[1]
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    first, second = torch.ones(1024, device="cuda"), torch.ones(2048, device="cuda")
    for warm_up in (
        first,
        second,
        first.double(),
    ):  # connects the ranks, for which NCCL waits on the host
        dist.all_reduce(warm_up)
        dist.broadcast(warm_up, 0)
    torch.cuda.synchronize()
    is_different = rank == 1 and how != "same"
    if how == "died" and is_different:
        os._exit(0)
    if how == "order" and is_different:
        dist.broadcast(second, 0, async_op=True)
        dist.all_reduce(first, async_op=True)
    elif how == "root":
        dist.broadcast(second, int(is_different), async_op=True)
    elif how == "type":
        dist.all_reduce(first.double() if is_different else first, async_op=True)
    elif how == "count":
        dist.all_reduce(second if is_different else first, async_op=True)
    else:
        dist.all_reduce(first, async_op=True)
        dist.broadcast(second, 0, async_op=True)
    time.sleep(2)
    print(f"rank {rank} has called", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
