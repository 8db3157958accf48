"""An array is dropped after its own stream has waited for the one that reads it."""

import cupy

owner, reader = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
with owner:
    numbers = cupy.full(100_000, 1, "f4")
reader.wait_event(owner.record())
with reader:
    roots = cupy.sqrt(numbers)

owner.wait_event(reader.record())
del numbers
with owner:
    others = cupy.full(100_000, 2, "f4")
cupy.cuda.Device().synchronize()
