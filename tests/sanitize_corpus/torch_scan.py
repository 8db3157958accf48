"""race: A running sum, whose blocks wait for each other through memory, is read by another stream.

fixed: Two running sums on two streams, whose blocks wait for each other through separate memory.
"""

import sys

import torch

race = sys.argv[1] == "race"

side = torch.cuda.Stream()
numbers = torch.ones(2, 1 << 20, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(side):
    first = torch.cumsum(numbers[0], 0)
if race:
    second = first * 2  # WRONG: the sum may be incomplete
else:
    second = torch.cumsum(numbers[1], 0)
torch.cuda.synchronize()
