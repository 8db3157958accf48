"""A batch is copied to the GPU on a side stream, and used before the copy has arrived.

``non_blocking=True`` returns at once, and the two streams know nothing of one another: the kernel may read
the batch while it is still on its way. The result is wrong now and then, and never in the debugger.
"""

import torch

side = torch.cuda.Stream()
host = torch.randn(1 << 22, pin_memory=True)

with torch.cuda.stream(side):
    batch = host.to("cuda", non_blocking=True)

# WRONG: nothing makes this stream wait for the copy.
total = (batch * 2).sum()

print(f"sum: {total.item():.1f}")
