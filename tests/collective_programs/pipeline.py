"""Two stages of a pipeline: torchrun --standalone --nproc-per-node 2 pipeline.py [bug]"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

STEPS, SHAPE = 8, (256, 1024)


def main() -> None:
    has_bug = "bug" in sys.argv[1:]
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    stage = torch.nn.Linear(1024, 1024).cuda()
    for step in range(STEPS):
        if rank == 0:
            activations = stage(torch.full(SHAPE, float(step), device="cuda"))
            dist.send(activations.detach(), 1)
            gradient = torch.empty(SHAPE, device="cuda")
            dist.recv(gradient, 1)
            activations.backward(gradient)
        else:
            received = torch.empty(SHAPE, device="cuda")
            work = dist.irecv(received, 0)
            if not has_bug:
                work.wait()
            # WRONG with the bug: the activations may not have been received
            inputs = received.clone().requires_grad_()
            if has_bug:
                work.wait()
            stage(inputs).square().mean().backward()
            dist.send(inputs.grad, 0)
    torch.cuda.synchronize()
    print(f"rank {rank}: {stage.weight.grad.norm().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
