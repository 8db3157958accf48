"""Memory of one stream's pool is used on another stream, and the allocator is told."""

import torch

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
host = torch.ones(1 << 22, pin_memory=True)

with torch.cuda.stream(side):
    first = host.to("cuda", non_blocking=True)
main.wait_stream(side)
total = (first * 2).sum()

# The block stays where it is until the other stream has got this far.
first.record_stream(main)
del first
with torch.cuda.stream(side):
    second = host.to("cuda", non_blocking=True)

print(f"sum: {total.item():.1f}")
