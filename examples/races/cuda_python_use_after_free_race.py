"""Memory is freed on one stream while a fill on another stream may still be running.

After the free, the driver may give the memory to the next allocation, whose contents the fill would
overwrite.
"""

from cuda.bindings import driver

from cuda_driver import call, open_device, stream, wait

SIZE = 1 << 24

open_device()
owner, user = stream(), stream()

memory = call(driver.cuMemAllocAsync(SIZE, owner))
wait(user, owner)
call(driver.cuMemsetD8Async(memory, 0, SIZE, user))

# WRONG: the owner's stream does not wait for the fill.
call(driver.cuMemFreeAsync(memory, owner))
call(driver.cuCtxSynchronize())
print("allocated, filled, freed")
