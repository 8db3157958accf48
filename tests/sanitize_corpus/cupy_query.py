"""race: The host polls an event that was recorded on another stream than the kernel's.

fixed: The host polls an event until it is done, and then enqueues the dependent work.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second, third = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
numbers = cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
# WRONG if race: the event's stream has no work to wait for.
done = (third if race else first).record()
while not done.done:
    pass
with second:
    numbers *= 2
cupy.cuda.Device().synchronize()
