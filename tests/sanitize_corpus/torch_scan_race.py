"""A running sum, whose blocks wait for one another through memory, is read by another stream."""

import torch

side = torch.cuda.Stream()
numbers = torch.ones(2, 1 << 20, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(side):
    first = torch.cumsum(numbers[0], 0)
second = first * 2  # WRONG: it may not be there yet
torch.cuda.synchronize()
