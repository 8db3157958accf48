"""A kernel writes four elements at a time and its tail one by one: what follows is another stream's."""

import cupy

fill = cupy.RawKernel(
    r"""
extern "C" __global__ void fill_by_four(float *numbers, long long size)
{
    long long i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 4 <= size)
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
    fill((2,), (128,), (numbers, 1001))
with second:
    numbers[1001:] += 2
cupy.cuda.Device().synchronize()
