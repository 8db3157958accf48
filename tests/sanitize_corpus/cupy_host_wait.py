"""race: The host waits for a stream before the kernel is put there, and then hands its array to another stream.

fixed: The host waits for a stream, and then hands its array to another one.
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
    # WRONG if race: the host has waited for what was there before the kernel.
    numbers *= 2
cupy.cuda.Device().synchronize()
