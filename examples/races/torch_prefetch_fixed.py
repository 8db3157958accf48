"""A batch is copied to the GPU on a side stream, and the current stream waits for the copy."""

import torch

side = torch.cuda.Stream()
host = torch.randn(1 << 22, pin_memory=True)

with torch.cuda.stream(side):
    batch = host.to("cuda", non_blocking=True)

# The batch was allocated on the side stream, so the allocator must know that this stream uses it too.
torch.cuda.current_stream().wait_stream(side)
batch.record_stream(torch.cuda.current_stream())
total = (batch * 2).sum()

print(f"sum: {total.item():.1f}")
