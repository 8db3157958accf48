"""race: A stream waits for an event whose last record comes after the wait, where it has no effect.

fixed: A stream waits for an event that was recorded twice: the last record before the wait counts.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers, done = cupy.ones(10_000, "f4"), cupy.cuda.Event()
cupy.cuda.Device().synchronize()

first.record(done)
with first:
    numbers += 1
if not race:
    first.record(done)
second.wait_event(done)
if race:
    # WRONG: too late, the wait used the earlier record.
    first.record(done)
with second:
    numbers *= 2
cupy.cuda.Device().synchronize()
