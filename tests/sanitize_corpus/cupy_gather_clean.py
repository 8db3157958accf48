"""A kernel gathers through an index that stays out of the half which another stream fills."""

import cupy

gather = cupy.RawKernel(
    r"""
extern "C" __global__ void gather(const float *from, const int *index, float *to)
{
    to[threadIdx.x] = from[index[threadIdx.x]];
}
""",
    "gather",
)
first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers, chosen = cupy.arange(2000, dtype="f4"), cupy.zeros(256, "f4")
index = cupy.arange(0, 256 * 3, 3, dtype="i4")  # up to 765
cupy.cuda.Device().synchronize()

with first:
    gather((1,), (256,), (numbers, index, chosen))
with second:
    numbers[1000:] *= 2
cupy.cuda.Device().synchronize()
