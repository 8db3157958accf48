"""The host asks until an event is reached, which was recorded in another stream than the kernel's."""

import cupy

first, second, third = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
numbers = cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
# WRONG: nothing is there that anybody waits for.
done = third.record()
while not done.done:
    pass
with second:
    numbers *= 2
cupy.cuda.Device().synchronize()
