"""race: A cooperatively launched kernel adds to memory that another stream multiplies.

fixed: A cooperatively launched kernel adds to memory; another stream waits for it and then multiplies.
"""

import sys

from cuda.bindings import driver

from cuda_kernels import call, compiled, function, launch, open_device, stream, wait, zeros

race = sys.argv[1] == "race"

SOURCE = r"""
extern "C" __global__ void add(int *numbers) { numbers[blockIdx.x * blockDim.x + threadIdx.x] += 1; }
extern "C" __global__ void multiply(int *numbers) { numbers[threadIdx.x] *= 2; }
"""
open_device()
first, second = stream(), stream()
module = compiled(SOURCE)
cooperative = driver.CUlaunchAttribute()
cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
cooperative.value.cooperative = 1
numbers = zeros(4 * 1024)

launch(function(module, "add"), first, 4, 256, numbers, attributes=[cooperative])
# WRONG if race: the second stream does not wait.
if not race:
    wait(second, first)
launch(function(module, "multiply"), second, 1, 256, numbers)
call(driver.cuCtxSynchronize())
