"""A tensor is filled on the default stream and modified in place on a side stream.

This is the mistake that PyTorch's documentation of its CUDA sanitizer shows: the multiplication may start
before the fill is complete. Both operations are kernels, so finding the race needs exact accesses.
"""

import torch

side = torch.cuda.Stream()
noise = torch.empty(1 << 22, device="cuda").normal_()

with torch.cuda.stream(side):
    # WRONG: normal_() runs on the default stream, and the side stream does not wait for it.
    torch.mul(noise, 5, out=noise)

torch.cuda.synchronize()
print(f"sum: {noise.sum().item():.1f}")
