"""race: A kernel fills a slice in whole blocks, past its end into the slice of another stream.

fixed: A kernel fills a slice in blocks, the last one with a mask.
"""

import sys

import torch
import triton
import triton.language as tl

race = sys.argv[1] == "race"


@triton.jit
def fill(numbers, begin, end, value, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    places = begin + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WHOLE:
        end += BLOCK - (end - begin) % BLOCK  # WRONG: the last block is not masked
    tl.store(numbers + places, value, mask=places < end)


side = torch.cuda.Stream()
numbers = torch.zeros(4096, device="cuda")
torch.cuda.synchronize()

fill[(4,)](numbers, 0, 1000, 1.0, BLOCK=256, WHOLE=race)
with torch.cuda.stream(side):
    fill[(4,)](numbers, 1000, 2000, 2.0, BLOCK=256, WHOLE=race)
torch.cuda.synchronize()
