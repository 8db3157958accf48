"""race: A kernel copies bytes into shared memory asynchronously while another stream writes them.

fixed: A kernel copies one half of an array into shared memory asynchronously; another stream writes the
  other half.
"""

import sys

from cuda.bindings import driver

from cuda_kernels import call, compiled, function, launch, open_device, stream, zeros

race = sys.argv[1] == "race"

SOURCE = r"""
extern "C" __global__ void stage(const int *from, int *to)
{
    __shared__ __align__(16) int staged[1024];
    unsigned int place = __cvta_generic_to_shared(staged + 4 * threadIdx.x);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from + 4 * threadIdx.x));
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    to[threadIdx.x] = staged[1023 - threadIdx.x];
}
extern "C" __global__ void fill(int *numbers) { numbers[threadIdx.x] = threadIdx.x; }
"""
open_device()
first, second = stream(), stream()
module = compiled(SOURCE)
numbers, staged = zeros(4 * 2048), zeros(4 * 256)

launch(function(module, "stage"), first, 1, 256, numbers, staged)
if race:
    # WRONG: the kernel may copy the bytes before or after this.
    launch(function(module, "fill"), second, 1, 256, numbers)
else:
    launch(function(module, "fill"), second, 1, 256, numbers + 4 * 1024)
call(driver.cuCtxSynchronize())
