"""race: A tensor is deleted while another stream's kernel reads it, and the allocator reuses its memory.

fixed: A tensor is deleted while another stream's kernel reads it, after record_stream.
"""

import sys

import torch

race = sys.argv[1] == "race"

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
with torch.cuda.stream(side):
    first = torch.full((1 << 20,), 1.0, device="cuda")
main.wait_stream(side)
doubled = first * 2

# WRONG if race: the block returns to the side stream, which does not wait for the kernel above.
if not race:
    first.record_stream(main)
del first
with torch.cuda.stream(side):
    second = torch.full((1 << 20,), 2.0, device="cuda")
torch.cuda.synchronize()
