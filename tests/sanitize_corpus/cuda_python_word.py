"""race: A stream waits for a memory word that another stream writes before the kernel, not after it.

fixed: A stream waits for a memory word that another stream writes after its kernel.
"""

import sys

from cuda.bindings import driver

from cuda_kernels import call, compiled, function, launch, open_device, stream, zeros

race = sys.argv[1] == "race"

SOURCE = 'extern "C" __global__ void add(int *numbers) { numbers[threadIdx.x] += 1; }'

open_device()
first, second = stream(), stream()
add, numbers, word = function(compiled(SOURCE), "add"), zeros(4 * 256), zeros(4)
equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ

# WRONG if race: the word does not cover the kernel after it.
if not race:
    launch(add, first, 1, 256, numbers)
call(driver.cuStreamWriteValue32(first, word, 1, 0))
if race:
    launch(add, first, 1, 256, numbers)
call(driver.cuStreamWaitValue32(second, word, 1, equal))
launch(add, second, 1, 256, numbers)
call(driver.cuCtxSynchronize())
