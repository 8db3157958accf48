"""race: A kernel writes through pointers loaded from memory, one to memory that another stream writes.

fixed: A kernel writes through pointers loaded from memory, none to memory that another stream writes.
"""

import sys

import cupy

race = sys.argv[1] == "race"

fill = cupy.RawKernel(
    r"""
extern "C" __global__ void fill_all(float **arrays, long long size)
{
    for (long long i = threadIdx.x; i < size; i += blockDim.x)
        arrays[blockIdx.x][i] = i;
}
""",
    "fill_all",
)
first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
arrays = [cupy.zeros(1000, "f4") for _ in range(4)]
table = cupy.array([array.data.ptr for array in arrays[:3]], dtype="u8")
cupy.cuda.Device().synchronize()

with first:
    fill((3,), (128,), (table, 1000))
with second:
    # WRONG if race: the table has a pointer to this array, which is not an argument.
    arrays[2 if race else 3] += 1
cupy.cuda.Device().synchronize()
