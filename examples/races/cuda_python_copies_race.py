"""One stream copies to the device; another copies back without waiting for it.

The second copy may run before the first one, and return the earlier contents of the memory.
"""

from cuda.bindings import driver

from cuda_driver import call, open_device, stream

SIZE = 1 << 24

open_device()
upload, download = stream(), stream()
host = call(driver.cuMemAllocHost(2 * SIZE))
memory = call(driver.cuMemAlloc(SIZE))

call(driver.cuMemcpyHtoDAsync(memory, host, SIZE, upload))
# WRONG: the download stream does not wait for the first copy.
call(driver.cuMemcpyDtoHAsync(host + SIZE, memory, SIZE, download))

call(driver.cuCtxSynchronize())
print("copied there and back")
