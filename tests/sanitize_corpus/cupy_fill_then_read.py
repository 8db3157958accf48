"""race: A kernel reads memory that a fill on another stream writes.

fixed: A kernel reads memory after waiting for the fill on another stream.
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
    # WRONG if race: the fill may not have started.
    roots = cupy.sqrt(numbers)
cupy.cuda.Device().synchronize()
