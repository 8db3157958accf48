"""A tensor of one stream is used on another, and ``record_stream`` informs the allocator about that use."""

import torch

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
host = torch.ones(1 << 22, pin_memory=True)

with torch.cuda.stream(side):
    first = host.to("cuda", non_blocking=True)
main.wait_stream(side)
total = (first * 2).sum()

# The allocator does not reuse the block before the main stream has reached this point.
first.record_stream(main)
del first
with torch.cuda.stream(side):
    second = host.to("cuda", non_blocking=True)

print(f"sum: {total.item():.1f}")
