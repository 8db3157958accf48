"""race: Two streams modify columns of one matrix through views that share one column.

fixed: Two streams modify the even and the odd columns of one matrix through views of the same memory.
"""

import sys

import torch

race = sys.argv[1] == "race"

side = torch.cuda.Stream()
matrix = torch.ones(500, 9, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(side):
    matrix[:, ::2].add_(1)
if race:
    # WRONG: columns 4 and 8 are in both views.
    matrix[:, 4::4].mul_(2)
else:
    matrix[:, 1::2].mul_(2)
torch.cuda.synchronize()
