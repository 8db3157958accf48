"""One stream clears the first half of a buffer, another overwrites the second half.

Operations that share no bytes need no synchronization.
"""

from cuda.bindings import driver

from cuda_driver import call, open_device, stream

SIZE = 1 << 24

open_device()
clearing, upload = stream(), stream()
host = call(driver.cuMemAllocHost(SIZE))
memory = call(driver.cuMemAlloc(SIZE))

call(driver.cuMemsetD8Async(memory, 0, SIZE // 2, clearing))
call(driver.cuMemcpyHtoDAsync(int(memory) + SIZE // 2, host, SIZE // 2, upload))

call(driver.cuCtxSynchronize())
print("cleared and copied")
