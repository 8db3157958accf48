"""A kernel uses stream-ordered memory on a stream that has not waited for its allocation."""

import cupy

cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
owner, user = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
with owner:
    numbers = cupy.empty(100_000, "f4")
with user:
    # WRONG: in the order of the streams the memory is not there yet.
    numbers.fill(1)
owner.wait_event(user.record())
cupy.cuda.Device().synchronize()
