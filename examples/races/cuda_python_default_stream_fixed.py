"""A fill on the default stream, and a copy on a blocking stream, which waits for the fill implicitly."""

from cuda.bindings import driver

from cuda_driver import call, open_device, stream

SIZE = 1 << 24

open_device()
download = stream(blocking=True)
host = call(driver.cuMemAllocHost(SIZE))
memory = call(driver.cuMemAlloc(SIZE))

call(driver.cuMemsetD8Async(memory, 1, SIZE, 0))
call(driver.cuMemcpyDtoHAsync(host, memory, SIZE, download))

call(driver.cuCtxSynchronize())
print("filled and copied")
