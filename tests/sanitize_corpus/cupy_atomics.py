"""race: Kernels add to counters atomically while a plain kernel on another stream reads them.

fixed: Kernels on two streams add to the same counters, all of them atomically.
"""

import sys

import cupy

race = sys.argv[1] == "race"

count = cupy.RawKernel(
    r"""
extern "C" __global__ void count(unsigned int *counters)
{
    atomicAdd(&counters[threadIdx.x % 32], 1u);
}
""",
    "count",
)
first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
counters = cupy.zeros(32, "u4")
cupy.cuda.Device().synchronize()

with first:
    count((16,), (256,), (counters,))
with second:
    if race:
        # WRONG: the kernel may read incomplete counts.
        doubled = counters * 2
    else:
        count((16,), (256,), (counters,))
cupy.cuda.Device().synchronize()
