"""Memory is allocated on one stream, and filled on another one that does not wait for the allocation.

cuMemAllocAsync returns an address at once, but the memory is allocated in stream order: before that it may
belong to another allocation.
"""

from cuda.bindings import driver

from cuda_driver import call, open_device, stream, wait

SIZE = 1 << 24

open_device()
owner, user = stream(), stream()

memory = call(driver.cuMemAllocAsync(SIZE, owner))
# WRONG: the other stream may run before the allocation.
call(driver.cuMemsetD8Async(memory, 0, SIZE, user))

wait(owner, user)
call(driver.cuMemFreeAsync(memory, owner))
call(driver.cuCtxSynchronize())
print("allocated, filled, freed")
