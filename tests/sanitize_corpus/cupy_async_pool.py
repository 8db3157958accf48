"""race: A kernel uses stream-ordered memory on a stream that has not waited for its allocation.

fixed: A kernel uses stream-ordered memory on a stream that has waited for its allocation.
"""

import sys

import cupy

race = sys.argv[1] == "race"

cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
owner, user = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
with owner:
    numbers = cupy.empty(100_000, "f4")
if not race:
    user.wait_event(owner.record())
with user:
    # WRONG if race: in stream order, the memory is not allocated yet.
    numbers.fill(1)
owner.wait_event(user.record())
cupy.cuda.Device().synchronize()
