"""A batch is copied to the GPU on a side stream, and used before the copy is complete.

``non_blocking=True`` returns at once, and the two streams are not ordered: the kernel may read the batch
during the copy. Results are wrong only sometimes, and never in a debugger.
"""

import torch

side = torch.cuda.Stream()
host = torch.randn(1 << 22, pin_memory=True)

with torch.cuda.stream(side):
    batch = host.to("cuda", non_blocking=True)

# WRONG: the current stream does not wait for the copy.
total = (batch * 2).sum()

print(f"sum: {total.item():.1f}")
