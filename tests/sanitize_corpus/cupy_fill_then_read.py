"""race: A kernel reads what a fill on another stream writes.

fixed: A kernel reads what a fill on another stream wrote, and waits for it.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

numbers.data.memset_async(0, numbers.nbytes, first)
if not race:
    second.wait_event(first.record())
with second:
    # WRONG if race: the ones may still be there.
    roots = cupy.sqrt(numbers)
cupy.cuda.Device().synchronize()
