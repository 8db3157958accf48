"""race: A kernel adds to a range with a bulk reduction while another stream reads it.

fixed: Two kernels on two streams add to the same range with bulk reductions, which are atomic per element.
"""

import sys

from cuda.bindings import driver

from cuda_kernels import call, compiled, function, launch, open_device, stream, zeros

race = sys.argv[1] == "race"

SOURCE = r"""
extern "C" __global__ void accumulate(int *to)
{
    __shared__ __align__(128) int made[1024];
    for (int i = threadIdx.x; i < 1024; i += blockDim.x)
        made[i] = i;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned int data = __cvta_generic_to_shared(made);
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], 4096;"
                     ::"l"(to), "r"(data) : "memory");
        asm volatile("cp.async.bulk.commit_group;");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
extern "C" __global__ void copy(const int *from, int *to) { to[threadIdx.x] = from[threadIdx.x]; }
"""
open_device()
first, second, module = stream(), stream(), compiled(SOURCE)
numbers, copied = zeros(4 * 1024), zeros(4 * 256)

launch(function(module, "accumulate"), first, 1, 256, numbers)
if race:
    launch(function(module, "copy"), second, 1, 256, numbers, copied)  # WRONG: incomplete sums
else:
    launch(function(module, "accumulate"), second, 1, 256, numbers)
call(driver.cuCtxSynchronize())
