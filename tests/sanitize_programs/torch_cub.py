"""Sorts, scan and select by CUB; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import run_steps


def select(numbers):
    numbers.sort(), numbers.unique(), numbers.cumsum(0), numbers.topk(50)
    numbers[numbers > 0], numbers.nonzero(), torch.bincount(numbers.abs().long() * 10)
    torch.histc(numbers), numbers.median(), torch.argsort(numbers.view(100, -1), dim=1)


run_steps(select, torch.randn(100_000), race=sys.argv[1] == "race")
