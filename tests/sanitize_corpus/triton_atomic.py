"""race: A histogram is computed atomically on one stream, and read on another one.

fixed: A histogram is computed on two streams concurrently, with atomics.
"""

import sys

import torch
import triton
import triton.language as tl

race = sys.argv[1] == "race"


@triton.jit
def count(numbers, counters, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counters + tl.load(numbers + places), tl.full((BLOCK,), 1, tl.int32))


side = torch.cuda.Stream()
numbers = torch.arange(4096, device="cuda") % 40
counters = torch.zeros(40, dtype=torch.int32, device="cuda")
torch.cuda.synchronize()

count[(16,)](numbers, counters, BLOCK=256)
with torch.cuda.stream(side):
    if race:
        doubled = counters * 2  # WRONG: the counts are incomplete
    else:
        count[(16,)](numbers, counters, BLOCK=256)
torch.cuda.synchronize()
