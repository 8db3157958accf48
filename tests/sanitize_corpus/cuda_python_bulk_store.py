"""race: A kernel bulk-stores a range whose last element another stream reads.

fixed: A kernel bulk-stores a range; another stream reads directly behind it.
"""

import sys

from cuda.bindings import driver

from cuda_kernels import call, compiled, function, launch, open_device, stream, zeros

race = sys.argv[1] == "race"

SOURCE = r"""
extern "C" __global__ void store(int *to)
{
    __shared__ __align__(128) int made[1024];
    for (int i = threadIdx.x; i < 1024; i += blockDim.x)
        made[i] = i;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned int data = __cvta_generic_to_shared(made);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 4096;" ::"l"(to), "r"(data) : "memory");
        asm volatile("cp.async.bulk.commit_group;");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
extern "C" __global__ void copy(const int *from, int *to) { to[threadIdx.x] = from[threadIdx.x]; }
"""
open_device()
first, second, module = stream(), stream(), compiled(SOURCE)
numbers, copied = zeros(4 * 2048), zeros(4 * 256)

launch(function(module, "store"), first, 1, 256, numbers)
# WRONG if race: one element too early
launch(function(module, "copy"), second, 1, 256, numbers + 4 * (1023 if race else 1024), copied)
call(driver.cuCtxSynchronize())
