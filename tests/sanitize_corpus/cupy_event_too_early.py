"""race: A stream waits for an event that was recorded before the kernel, not after it.

fixed: A stream waits for an event that was recorded after the kernel.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers, results = cupy.ones(10_000, "f4"), cupy.zeros(10_000, "f4")
cupy.cuda.Device().synchronize()

if race:
    # WRONG: the event covers the stream's work so far, which is none.
    done = first.record()
with first:
    cupy.multiply(numbers, 2, out=results)
if not race:
    done = first.record()
second.wait_event(done)
with second:
    results += 1
cupy.cuda.Device().synchronize()
