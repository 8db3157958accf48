"""Read and write by index, forward and backward; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import run_steps

table = torch.nn.EmbeddingBag(1000, 64, mode="sum").cuda()
target = torch.zeros(1000, 64, device="cuda")


def index(indices):
    picked = table(indices)
    picked.square().mean().backward()
    flat = indices.flatten()
    rows = picked.detach().repeat_interleave(indices.shape[1], 0)
    target.index_put_((flat,), rows, accumulate=True)
    target.scatter_add_(0, flat[:, None].expand_as(rows), rows)
    target.gather(0, flat[:, None].expand_as(rows)).index_select(1, flat[:8] % 64)
    target.index_fill_(0, flat[:3], 0.0)


run_steps(index, torch.randint(0, 1000, (128, 10)), race=sys.argv[1] == "race")
