"""One stream clears a buffer, another overwrites its second half, in no defined order.

The two ranges start at different addresses but overlap, so this is a race.
"""

from cuda.bindings import driver

from cuda_driver import call, open_device, stream

SIZE = 1 << 24

open_device()
clearing, upload = stream(), stream()
host = call(driver.cuMemAllocHost(SIZE))
memory = call(driver.cuMemAlloc(SIZE))

call(driver.cuMemsetD8Async(memory, 0, SIZE, clearing))
# WRONG: the fill may clear the copied data.
call(driver.cuMemcpyHtoDAsync(int(memory) + SIZE // 2, host, SIZE // 2, upload))

call(driver.cuCtxSynchronize())
print("cleared and copied")
