"""A histogram is counted on two streams at once, atomically."""

import torch
import triton
import triton.language as tl


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
    count[(16,)](numbers, counters, BLOCK=256)
torch.cuda.synchronize()
