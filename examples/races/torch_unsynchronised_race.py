"""A tensor is filled on one stream and summed on another.

The mistake that the page "CUDA semantics" of PyTorch's documentation warns of: the sum may begin before
the fill has ended. Both sides are kernels, so it takes their exact accesses to be sure.
"""

import torch

side = torch.cuda.Stream()
noise = torch.empty(1 << 22, device="cuda").normal_()

with torch.cuda.stream(side):
    # WRONG: normal_() runs on the default stream, and the side stream does not wait for it.
    total = torch.sum(noise)

side.synchronize()
print(f"sum: {total.item():.1f}")
