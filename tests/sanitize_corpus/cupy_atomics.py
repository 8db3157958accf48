"""race: Kernels add to counters atomically, and a plain kernel on another stream reads them meanwhile.

fixed: Kernels on two streams add to the same counters, all of them atomically: that is what atomics are for.
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
        # WRONG: what is read is neither the counts before nor those after.
        doubled = counters * 2
    else:
        count((16,), (256,), (counters,))
cupy.cuda.Device().synchronize()
