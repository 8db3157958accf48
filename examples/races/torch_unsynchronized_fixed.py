"""A tensor is filled on the default stream and modified in place on a side stream that waits for the fill."""

import torch

side = torch.cuda.Stream()
noise = torch.empty(1 << 22, device="cuda").normal_()

side.wait_stream(torch.cuda.default_stream())
with torch.cuda.stream(side):
    torch.mul(noise, 5, out=noise)

torch.cuda.synchronize()
print(f"sum: {noise.sum().item():.1f}")
