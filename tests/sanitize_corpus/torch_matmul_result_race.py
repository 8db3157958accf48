"""A product is used on a side stream before it is complete."""

import torch

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
left, right = (torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
torch.cuda.synchronize()

product = left @ right
with torch.cuda.stream(side):
    # WRONG: the product belongs to the other stream, and may not be there.
    positive = torch.relu(product)
torch.cuda.synchronize()
