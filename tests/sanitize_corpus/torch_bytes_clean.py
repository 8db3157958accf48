"""Two streams fill two slices of bytes that meet in the middle of a vector."""

import torch

side = torch.cuda.Stream()
numbers = torch.zeros(4003, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(side):
    numbers[:2001].fill_(1)
numbers[2001:].fill_(2)
torch.cuda.synchronize()
