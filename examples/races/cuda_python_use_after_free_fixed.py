"""Memory is freed on one stream, which waits for the fill on another one."""

from cuda.bindings import driver

from cuda_driver import call, open_device, stream, wait

SIZE = 1 << 24

open_device()
owner, user = stream(), stream()

memory = call(driver.cuMemAllocAsync(SIZE, owner))
wait(user, owner)
call(driver.cuMemsetD8Async(memory, 0, SIZE, user))

wait(owner, user)
call(driver.cuMemFreeAsync(memory, owner))
call(driver.cuCtxSynchronize())
print("allocated, filled, freed")
