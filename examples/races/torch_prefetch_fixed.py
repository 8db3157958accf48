"""A batch is copied to the GPU on a side stream, and the stream that uses it waits for the copy."""

import torch

side = torch.cuda.Stream()
host = torch.randn(1 << 22, pin_memory=True)

with torch.cuda.stream(side):
    batch = host.to("cuda", non_blocking=True)

# The order of the streams, and then the allocator's: the batch is the side stream's memory.
torch.cuda.current_stream().wait_stream(side)
batch.record_stream(torch.cuda.current_stream())
total = (batch * 2).sum()

print(f"sum: {total.item():.1f}")
