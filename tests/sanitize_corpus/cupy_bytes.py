"""race: Two kernels write alternating bytes of the same words, and both write one byte.

fixed: Two kernels write the even and the odd bytes of the same words.
"""

import sys

import cupy

race = sys.argv[1] == "race"

fill = cupy.RawKernel(
    r"""
extern "C" __global__ void fill_every_other(unsigned char *bytes, long long begin, long long count)
{
    if (threadIdx.x < count)
        bytes[begin + 2 * threadIdx.x] = threadIdx.x;
}
""",
    "fill_every_other",
)
first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.zeros(1024, "u1")
cupy.cuda.Device().synchronize()

with first:
    fill((1,), (512,), (numbers, 0, 256))
with second:
    if race:
        # WRONG: byte 510 is the last one of the first kernel.
        fill((1,), (512,), (numbers, 510, 100))
    else:
        fill((1,), (512,), (numbers, 1, 256))
cupy.cuda.Device().synchronize()
