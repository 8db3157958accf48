"""race: A tensor of one stream is dropped while a kernel of another one reads it, and its memory is used again.

fixed: A tensor of one stream is dropped while a kernel of another one reads it, and the allocator is told.
"""

import sys

import torch

race = sys.argv[1] == "race"

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
with torch.cuda.stream(side):
    first = torch.full((1 << 20,), 1.0, device="cuda")
main.wait_stream(side)
doubled = first * 2

# WRONG if race: the block goes back to the side stream, which knows nothing of the kernel above.
if not race:
    first.record_stream(main)
del first
with torch.cuda.stream(side):
    second = torch.full((1 << 20,), 2.0, device="cuda")
torch.cuda.synchronize()
