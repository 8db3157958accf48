"""One stream copies to the device; another waits for it and copies back."""

from cuda.bindings import driver

from cuda_driver import call, open_device, stream, wait

SIZE = 1 << 24

open_device()
upload, download = stream(), stream()
host = call(driver.cuMemAllocHost(2 * SIZE))
memory = call(driver.cuMemAlloc(SIZE))

call(driver.cuMemcpyHtoDAsync(memory, host, SIZE, upload))
wait(download, upload)
call(driver.cuMemcpyDtoHAsync(host + SIZE, memory, SIZE, download))

call(driver.cuCtxSynchronize())
print("copied there and back")
