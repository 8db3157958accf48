"""race: Two sums, each by many blocks, are written to the same element on two streams.

fixed: Two sums, each by many blocks, are written to adjacent elements on two streams.
"""

import sys

import torch

race = sys.argv[1] == "race"

side = torch.cuda.Stream()
numbers, totals = torch.ones(2, 1 << 20, device="cuda"), torch.zeros(2, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(side):
    torch.sum(numbers[0], 0, out=totals[0])
# WRONG if race: the other sum writes the same element
torch.sum(numbers[1], 0, out=totals[0 if race else 1])
torch.cuda.synchronize()
