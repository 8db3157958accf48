"""A result is copied to the host on a side stream, which waits for the kernel that computes it."""

import torch

side = torch.cuda.Stream()
host = torch.empty(1 << 22, pin_memory=True)
result = torch.arange(1 << 22, device="cuda", dtype=torch.float32).sin_()

side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    host.copy_(result, non_blocking=True)

side.synchronize()
print(f"last: {host[-1]:.6f}")
