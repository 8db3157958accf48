"""race: The host waits for a stream before enqueueing the kernel there, then uses the array on another.

fixed: The host waits for a stream, and then uses its array on another one.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

if race:
    first.synchronize()
with first:
    numbers += 1
if not race:
    first.synchronize()
with second:
    # WRONG if race: the host waited for the work before the kernel only.
    numbers *= 2
cupy.cuda.Device().synchronize()
