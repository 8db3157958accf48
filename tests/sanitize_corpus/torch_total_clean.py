"""Two sums, each by many blocks, are written to neighbouring cells on two streams."""

import torch

side = torch.cuda.Stream()
numbers, totals = torch.ones(2, 1 << 20, device="cuda"), torch.zeros(2, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(side):
    torch.sum(numbers[0], 0, out=totals[0])
torch.sum(numbers[1], 0, out=totals[1])
torch.cuda.synchronize()
