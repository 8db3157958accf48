"""race: The host synchronizes one of two contexts, but not the one whose streams share memory.

fixed: The host synchronizes the context whose streams share memory.
"""

import sys

from cuda.bindings import driver

from cuda_kernels import call, compiled, function, launch, open_device, stream, zeros

race = sys.argv[1] == "race"

SOURCE = 'extern "C" __global__ void add(int *numbers) { numbers[threadIdx.x] += 1; }'

primary = open_device()
own = call(driver.cuCtxCreate(None, 0, call(driver.cuDeviceGet(0))))  # becomes the current context
first, second = stream(), stream()
add, numbers = function(compiled(SOURCE), "add"), zeros(4 * 256)

launch(add, first, 1, 256, numbers)
if race:
    call(driver.cuCtxSetCurrent(primary))
    call(driver.cuCtxSynchronize())  # WRONG: nothing runs in the primary context
    call(driver.cuCtxSetCurrent(own))
else:
    call(driver.cuCtxSynchronize())
launch(add, second, 1, 256, numbers)
call(driver.cuCtxSynchronize())
