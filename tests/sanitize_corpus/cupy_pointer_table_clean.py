"""A kernel writes through pointers that it loads from memory, none of them to what another stream writes."""

import cupy

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
    arrays[3] += 1
cupy.cuda.Device().synchronize()
