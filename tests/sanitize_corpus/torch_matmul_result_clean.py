"""A product is used on a side stream that waits for it."""

import torch

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
left, right = (torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
torch.cuda.synchronize()

product = left @ right
side.wait_stream(main)
with torch.cuda.stream(side):
    positive = torch.relu(product)
torch.cuda.synchronize()
