"""race: A third stream waits for the second, which does not wait for the first.

fixed: A third stream waits for the second, which waits for the first.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second, third = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
numbers, others = cupy.ones(10_000, "f4"), cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
if not race:
    second.wait_event(first.record())
with second:
    others += 1
third.wait_event(second.record())
with third:
    # WRONG if race: nothing orders this stream after the first one.
    numbers += others
cupy.cuda.Device().synchronize()
