"""race: The result of a GEMM is used on a side stream before it is complete.

fixed: The result of a GEMM is used on a side stream that waits for it.
"""

import sys

import torch

race = sys.argv[1] == "race"

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
left, right = (torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
torch.cuda.synchronize()

product = left @ right
if not race:
    side.wait_stream(main)
with torch.cuda.stream(side):
    # WRONG if race: the other stream may not have computed the result.
    positive = torch.relu(product)
torch.cuda.synchronize()
