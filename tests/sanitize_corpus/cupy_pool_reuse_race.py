"""An array is dropped while another stream still reads it, and its memory handed out again."""

import cupy

owner, reader = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
with owner:
    numbers = cupy.full(100_000, 1, "f4")
reader.wait_event(owner.record())
with reader:
    roots = cupy.sqrt(numbers)

# WRONG: the pool knows of the owner's stream alone.
del numbers
with owner:
    others = cupy.full(100_000, 2, "f4")
cupy.cuda.Device().synchronize()
