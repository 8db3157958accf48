"""Memory of one stream's pool is used on another stream, dropped, and handed out again too early.

The allocator hands a block out again, to the stream that it belongs to, as soon as the tensor is gone.
That is safe for what ran on that stream. It does not know of the kernel on the other stream, which may
still read the first batch when the second one is copied over it.
"""

import torch

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
host = torch.ones(1 << 22, pin_memory=True)

with torch.cuda.stream(side):
    first = host.to("cuda", non_blocking=True)
main.wait_stream(side)
total = (first * 2).sum()

# WRONG: the allocator was not told that another stream uses this memory.
del first
with torch.cuda.stream(side):
    second = host.to("cuda", non_blocking=True)

print(f"sum: {total.item():.1f}")
