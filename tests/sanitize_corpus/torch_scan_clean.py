"""Two running sums on two streams: the blocks of each wait for one another through memory of their own."""

import torch

side = torch.cuda.Stream()
numbers = torch.ones(2, 1 << 20, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(side):
    first = torch.cumsum(numbers[0], 0)
second = torch.cumsum(numbers[1], 0)
torch.cuda.synchronize()
