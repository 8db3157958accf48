"""race: Two kernels scatter into one array through two parts of an index that contains one position twice.

fixed: Two kernels scatter into one array through the two halves of a permutation.
"""

import sys

import cupy

race = sys.argv[1] == "race"

scatter = cupy.RawKernel(
    r"""
extern "C" __global__ void scatter(const int *index, float *to, float value)
{
    to[index[threadIdx.x]] = value;
}
""",
    "scatter",
)
first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.zeros(512, "f4")
places = cupy.arange(512, dtype="i4") * 77 % 512
if race:
    places[300] = places[30]  # WRONG: the position is in both halves of the index
cupy.cuda.Device().synchronize()

with first:
    scatter((1,), (256,), (places[:256], numbers, cupy.float32(1)))
with second:
    scatter((1,), (256,), (places[256:], numbers, cupy.float32(2)))
cupy.cuda.Device().synchronize()
