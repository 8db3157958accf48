"""Groups of calls on two communicators: torchrun --standalone --nproc-per-node 2 groups.py [bug]"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

STEPS, ELEMENTS = 4, 1 << 18


def main() -> None:
    has_bug = "bug" in sys.argv[1:]
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank, rank_count = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    other_group = dist.new_group(list(range(rank_count)))  # NCCL splits the first communicator
    left, right = (rank - 1) % rank_count, (rank + 1) % rank_count
    for step in range(STEPS):
        sent = torch.full((ELEMENTS,), float(rank + step), device="cuda")
        received = torch.zeros(ELEMENTS, device="cuda")
        exchange = [
            dist.P2POp(dist.isend, sent, right),
            dist.P2POp(dist.irecv, received, left),
        ]
        works = dist.batch_isend_irecv(exchange)
        if not has_bug:
            for work in works:
                work.wait()
        total = (
            received.sum()
        )  # WRONG with the bug: the other rank's values may not have been received
        for work in works:
            work.wait()
        sums = [torch.ones(ELEMENTS, device="cuda") for _ in range(3)]
        with dist._coalescing_manager(group=other_group, async_ops=True) as coalesced:
            for values in sums:
                dist.all_reduce(values, group=other_group)
        coalesced.wait()
        scattered = torch.empty(ELEMENTS // rank_count, device="cuda")
        dist.reduce_scatter_tensor(scattered, sums[0])
        dist.all_to_all_single(received, sums[1])
    torch.cuda.synchronize()
    print(f"rank {rank}: {total.item()}, {scattered[0].item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
