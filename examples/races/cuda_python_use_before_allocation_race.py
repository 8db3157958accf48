"""Memory is allocated in the order of one stream, and filled on another that does not wait for it.

cuMemAllocAsync returns an address at once. The memory behind it is there for what is ordered after the
call in its stream; before that it may belong to somebody else.
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
