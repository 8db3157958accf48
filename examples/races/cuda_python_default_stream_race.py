"""A fill on the default stream, and a copy on a non-blocking stream, which does not wait for the fill.

The legacy default stream and all other streams of its context wait for each other, except for streams that
were created with CU_STREAM_NON_BLOCKING.
"""

from cuda.bindings import driver

from cuda_driver import call, open_device, stream

SIZE = 1 << 24

open_device()
download = stream(blocking=False)
host = call(driver.cuMemAllocHost(SIZE))
memory = call(driver.cuMemAlloc(SIZE))

call(driver.cuMemsetD8Async(memory, 1, SIZE, 0))
# WRONG: a non-blocking stream does not wait for the default stream.
call(driver.cuMemcpyDtoHAsync(host, memory, SIZE, download))

call(driver.cuCtxSynchronize())
print("filled and copied")
