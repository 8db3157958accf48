"""A tensor is filled on one stream and summed on another, which waits for the first."""

import torch

side = torch.cuda.Stream()
noise = torch.empty(1 << 22, device="cuda").normal_()

side.wait_stream(torch.cuda.default_stream())
with torch.cuda.stream(side):
    total = torch.sum(noise)
noise.record_stream(side)

side.synchronize()
print(f"sum: {total.item():.1f}")
