"""Memory is freed in the order of one stream while another may still fill it.

After the free the driver gives the memory to the next allocation, and the fill then destroys what that one
holds.
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
