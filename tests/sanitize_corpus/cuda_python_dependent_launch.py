"""race: A kernel may begin before its predecessor ends; another stream reads the result without waiting for
  either.

fixed: A kernel may begin before its predecessor ends, and waits in its own code before it reads the result.
"""

import sys

from cuda.bindings import driver

from cuda_kernels import call, compiled, function, launch, open_device, stream, wait, zeros

race = sys.argv[1] == "race"

SOURCE = r"""
extern "C" __global__ void fill(int *numbers)
{
    asm volatile("griddepcontrol.launch_dependents;");
    numbers[threadIdx.x] = threadIdx.x;
}
extern "C" __global__ void add(int *numbers)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
    numbers[threadIdx.x] += 1;
}
extern "C" __global__ void copy(const int *from, int *to) { to[threadIdx.x] = from[threadIdx.x]; }
"""
open_device()
first, second = stream(), stream()
module = compiled(SOURCE)
early = driver.CUlaunchAttribute()
early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
early.value.programmaticStreamSerializationAllowed = 1
numbers, copied = zeros(4 * 256), zeros(4 * 256)

launch(function(module, "fill"), first, 1, 256, numbers)
launch(function(module, "add"), first, 1, 256, numbers, attributes=[early])
# WRONG if race: the second stream waits for neither kernel.
if not race:
    wait(second, first)
launch(function(module, "copy"), second, 1, 256, numbers, copied)
call(driver.cuCtxSynchronize())
