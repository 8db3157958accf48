"""race: A GEMM runs while another stream overwrites part of an operand.

fixed: A GEMM reads the left half of a matrix while another stream overwrites the right half.
"""

import sys

import torch

race = sys.argv[1] == "race"

side = torch.cuda.Stream()
left = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
right = torch.ones(4096, 8192, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()

product = left @ right[:, :4096]
with torch.cuda.stream(side):
    # WRONG if race: the first two of these columns are in the left half.
    right[:, (4094 if race else 4096) :].fill_(2)
torch.cuda.synchronize()
