"""race: An array is modified in place on two unordered streams.

fixed: An array is modified in place on two streams, the second of which waits for the first.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
if not race:
    second.wait_event(first.record())
with second:
    # WRONG if race: the addition may run before or after this.
    numbers *= 2
cupy.cuda.Device().synchronize()
