"""A result is copied to the host on a side stream, which does not wait for the kernel that computes it.

The host waits for the side stream, so the copy is complete, but it may have copied memory before the kernel
wrote it.
"""

import torch

side = torch.cuda.Stream()
host = torch.empty(1 << 22, pin_memory=True)
result = torch.arange(1 << 22, device="cuda", dtype=torch.float32).sin_()

with torch.cuda.stream(side):
    # WRONG: the side stream does not wait for sin_().
    host.copy_(result, non_blocking=True)

side.synchronize()
print(f"last: {host[-1]:.6f}")
