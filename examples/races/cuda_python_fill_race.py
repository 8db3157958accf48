"""Memory is cleared on one stream, and half of it overwritten on another, in either order.

Only the bytes that both touch matter: the two ranges begin at different addresses.
"""

from cuda.bindings import driver

from cuda_driver import call, open_device, stream

SIZE = 1 << 24

open_device()
clearing, upload = stream(), stream()
host = call(driver.cuMemAllocHost(SIZE))
memory = call(driver.cuMemAlloc(SIZE))

call(driver.cuMemsetD8Async(memory, 0, SIZE, clearing))
# WRONG: what is copied may be cleared afterwards.
call(driver.cuMemcpyHtoDAsync(int(memory) + SIZE // 2, host, SIZE // 2, upload))

call(driver.cuCtxSynchronize())
print("cleared and copied")
