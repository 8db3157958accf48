"""race: The host asks until an event is reached, which was recorded in another stream than the kernel's.

fixed: The host asks until an event is reached, and only then enqueues what needs it.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second, third = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
numbers = cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
# WRONG if race: nothing is there that anybody waits for.
done = (third if race else first).record()
while not done.done:
    pass
with second:
    numbers *= 2
cupy.cuda.Device().synchronize()
