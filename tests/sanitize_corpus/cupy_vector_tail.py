"""race: A kernel writes four elements at a time, past its end into memory that another stream writes.

fixed: A kernel writes four elements at a time and the remaining ones singly, never past its end.
"""

import sys

import cupy

race = sys.argv[1] == "race"

fill = cupy.RawKernel(
    r"""
extern "C" __global__ void fill_by_four(float *numbers, long long size, long long last)
{
    long long i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i < last)
        *(float4 *)(numbers + i) = make_float4(1, 1, 1, 1);
    else
        for (; i < size; i++)
            numbers[i] = 1;
}
""",
    "fill_by_four",
)
first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.zeros(2000, "f4")
cupy.cuda.Device().synchronize()

with first:
    # WRONG if race: 1001 is not a multiple of four, which the kernel does not check.
    fill((2,), (128,), (numbers, 1001, 1001 if race else 998))
with second:
    numbers[1001:] += 2
cupy.cuda.Device().synchronize()
