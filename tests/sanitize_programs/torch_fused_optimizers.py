"""Train by fused Adam, foreach AdamW and Adagrad at the same time; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import run_steps

model = torch.nn.Sequential(
    torch.nn.Linear(256, 256), torch.nn.LayerNorm(256), torch.nn.GELU(), torch.nn.Linear(256, 8)
).cuda()
first, second, third = ([*layer.parameters()] for layer in (model[0], model[1], model[3]))
optimizers = (
    torch.optim.Adam(first, fused=True),
    torch.optim.AdamW(second, foreach=True),
    torch.optim.Adagrad(third),
)


def step(inputs, labels):
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


run_steps(step, torch.randn(64, 256), torch.randint(0, 8, (64,)), race=sys.argv[1] == "race")
