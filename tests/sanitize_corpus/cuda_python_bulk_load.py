"""race: A kernel bulk-loads a range whose last element another stream writes.

fixed: A kernel bulk-loads a range; another stream writes directly behind it.
"""

import sys

from cuda.bindings import driver

from cuda_kernels import call, compiled, function, launch, open_device, stream, zeros

race = sys.argv[1] == "race"

SOURCE = r"""
extern "C" __global__ void load(const int *from, int *to)
{
    __shared__ __align__(128) int loaded[1024];
    __shared__ __align__(8) unsigned long long barrier;
    unsigned int data = __cvta_generic_to_shared(loaded), word = __cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(word) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 4096;" ::"r"(word) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 4096, [%2];"
                     ::"r"(data), "l"(from), "r"(word) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], 0; @!done bra again; }"
                 ::"r"(word) : "memory");
    to[threadIdx.x] = loaded[threadIdx.x];
}
extern "C" __global__ void fill(int *numbers) { numbers[threadIdx.x] = threadIdx.x; }
"""
open_device()
first, second, module = stream(), stream(), compiled(SOURCE)
numbers, loaded = zeros(4 * 2048), zeros(4 * 256)
launch(function(module, "load"), first, 1, 256, numbers, loaded)
# WRONG if race: one element too early
launch(function(module, "fill"), second, 1, 256, numbers + 4 * (1023 if race else 1024))
call(driver.cuCtxSynchronize())
