"""race: A kernel reads its array's pointer from constant memory; another stream writes to the same array.

fixed: A kernel reads its array's pointer from constant memory; another stream writes to another array.
"""

import sys

import cupy

race = sys.argv[1] == "race"

module = cupy.RawModule(
    code=r"""
extern "C" { __constant__ float *target; }
extern "C" __global__ void fill_target() { target[threadIdx.x] = threadIdx.x; }
"""
)
first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers, others = cupy.zeros(256, "f4"), cupy.zeros(256, "f4")
pointer = cupy.array([numbers.data.ptr], dtype="u8")
module.get_global("target").copy_from_device(pointer.data, 8)
cupy.cuda.Device().synchronize()

with first:
    module.get_function("fill_target")((1,), (256,), ())
with second:
    if race:
        # WRONG: the kernel has no arguments, but writes to this array.
        numbers += 1
    else:
        others += 1
cupy.cuda.Device().synchronize()
