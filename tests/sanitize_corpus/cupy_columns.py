"""race: Two kernels write a column of one matrix each, and the columns overlap in one element.

fixed: Two kernels write adjacent columns of one matrix: their bytes alternate and never overlap.
"""

import sys

import cupy

race = sys.argv[1] == "race"

fill = cupy.RawKernel(
    r"""
extern "C" __global__ void fill_column(float *matrix, long long columns, long long column)
{
    matrix[threadIdx.x * columns + column] = column;
}
""",
    "fill_column",
)
first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
matrix = cupy.zeros((257, 8), "f4")
cupy.cuda.Device().synchronize()

with first:
    fill((1,), (256,), (matrix, 8, 0))
with second:
    # WRONG if race: column 8 of 8 is column 0 of the next row.
    fill((1,), (256,), (matrix, 8, 8 if race else 1))
cupy.cuda.Device().synchronize()
