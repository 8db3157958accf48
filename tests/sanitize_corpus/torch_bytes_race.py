"""Two streams fill two slices of bytes, whose ends overlap by one byte in the middle of a vector."""

import torch

side = torch.cuda.Stream()
numbers = torch.zeros(4003, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(side):
    numbers[:2001].fill_(1)
numbers[2000:].fill_(2)  # WRONG: one byte too early
torch.cuda.synchronize()
