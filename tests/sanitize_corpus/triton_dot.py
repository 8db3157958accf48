"""race: A pipelined GEMM reads an operand whose second half another stream overwrites.

fixed: A pipelined GEMM reads the first half of an operand; another stream overwrites the second half.
"""

import sys

import torch
import triton
import triton.language as tl

race = sys.argv[1] == "race"


@triton.jit
def multiply(left, right, product, depth, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for k in range(0, depth, SIZE):
        some = tl.load(left + at[:, None] * depth + (k + at)[None, :])
        others = tl.load(right + (k + at)[:, None] * SIZE + at[None, :])
        total += tl.dot(some, others)
    tl.store(product + at[:, None] * SIZE + at[None, :], total)


side = torch.cuda.Stream()
left = torch.ones(64, 1024 if race else 512, dtype=torch.float16, device="cuda")
right = torch.ones(1024, 64, dtype=torch.float16, device="cuda")
product = torch.zeros(64, 64, device="cuda")
torch.cuda.synchronize()

multiply[(1,)](left, right, product, left.shape[1], SIZE=64)
with torch.cuda.stream(side):
    # WRONG if race: the loop continues to the end of the operand.
    right[512:].mul_(2)
torch.cuda.synchronize()
