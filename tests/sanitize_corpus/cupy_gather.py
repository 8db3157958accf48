"""race: A kernel gathers through an index that includes the half which another stream fills.

fixed: A kernel gathers through an index that excludes the half which another stream fills.
"""

import sys

import cupy

race = sys.argv[1] == "race"

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
step = 7 if race else 3
index = cupy.arange(0, 256 * step, step, dtype="i4")  # up to 1785, or 765
cupy.cuda.Device().synchronize()

with first:
    gather((1,), (256,), (numbers, index, chosen))
with second:
    # WRONG if race: the index contains positions beyond 1000.
    numbers[1000:] *= 2
cupy.cuda.Device().synchronize()
