"""Run a compiled function of inputs of changing length; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import run_steps

torch._inductor.config.compile_threads = 1


@torch.compile(dynamic=True)
def normalize(x):
    return torch.softmax(x - x.mean(), dim=-1).cumsum(-1)


def step(x):
    for length in (100, 77, 128):
        normalize(x[:, :length])


run_steps(step, torch.randn(64, 128), race=sys.argv[1] == "race")
