"""A tensor of one stream is used on another, deleted, and its memory reused too early.

The caching allocator reuses a block on its own stream as soon as the tensor is deleted. That is safe for the
work of that stream, but the kernel on the other stream may still read the first batch while the second one is
copied there.
"""

import torch

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
host = torch.ones(1 << 22, pin_memory=True)

with torch.cuda.stream(side):
    first = host.to("cuda", non_blocking=True)
main.wait_stream(side)
total = (first * 2).sum()

# WRONG: without record_stream the allocator does not know that another stream uses the memory.
del first
with torch.cuda.stream(side):
    second = host.to("cuda", non_blocking=True)

print(f"sum: {total.item():.1f}")
