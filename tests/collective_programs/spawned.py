"""The ranks of data_parallel.py, started by multiprocessing: python spawned.py [bug]"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
import torch.multiprocessing

from data_parallel import train

RANKS = 2


def run_rank(rank: int, port: int, has_bug: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl", rank=rank, world_size=RANKS)
    train(rank, has_bug=has_bug)
    dist.destroy_process_group()


if __name__ == "__main__":
    free_port = 29_000 + os.getpid() % 1000
    torch.multiprocessing.spawn(
        run_rank, args=(free_port, "bug" in sys.argv[1:]), nprocs=RANKS, join=True
    )
