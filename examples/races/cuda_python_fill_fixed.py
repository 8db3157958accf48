"""Memory is cleared on one stream, but for the half of it that is overwritten on another.

No order is needed where no byte is shared.
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
