"""Two streams change columns of one matrix through views, and one column is in both views."""

import torch

side = torch.cuda.Stream()
matrix = torch.ones(500, 9, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(side):
    matrix[:, ::2].add_(1)
# WRONG: columns 4 and 8 are even ones.
matrix[:, 4::4].mul_(2)
torch.cuda.synchronize()
