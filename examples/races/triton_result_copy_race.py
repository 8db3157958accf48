"""A Triton kernel runs on the current stream; a side stream copies its result without waiting.

The kernel is not a PyTorch operation, so tools that hook into PyTorch's dispatcher do not see it.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def square(numbers, result, size, BLOCK: tl.constexpr):  # noqa: N803 Triton's style
    positions = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(numbers + positions, mask=positions < size)
    tl.store(result + positions, values * values, mask=positions < size)


side = torch.cuda.Stream()
numbers = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
result = torch.empty_like(numbers)
host = torch.empty(result.shape, pin_memory=True)

square[(triton.cdiv(result.numel(), 1024),)](numbers, result, result.numel(), BLOCK=1024)
with torch.cuda.stream(side):
    # WRONG: the copy may begin before the kernel has ended.
    host.copy_(result, non_blocking=True)

side.synchronize()
print(f"last: {host[-1]:.0f}")
