"""race: Two kernels write one half of an array each, and the second half begins one element too early.

fixed: Two kernels get the same array and write one half of it each, without shared bytes.
"""

import sys

import cupy

race = sys.argv[1] == "race"

fill = cupy.RawKernel(
    r"""
extern "C" __global__ void fill(float *numbers, long long begin, long long end, float value)
{
    long long i = begin + blockIdx.x * blockDim.x + threadIdx.x;
    if (i < end)
        numbers[i] = value;
}
""",
    "fill",
)
first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.zeros(2000, "f4")
cupy.cuda.Device().synchronize()

with first:
    fill((8,), (128,), (numbers, 0, 1000, cupy.float32(1)))
with second:
    # WRONG if race: the first kernel also writes element 999.
    fill((8,), (128,), (numbers, 999 if race else 1000, 2000, cupy.float32(2)))
cupy.cuda.Device().synchronize()
