"""race: An array is deleted while another stream still reads it, and the pool reuses its memory.

fixed: An array is deleted after its own stream has waited for the stream that reads it.
"""

import sys

import cupy

race = sys.argv[1] == "race"

owner, reader = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
with owner:
    numbers = cupy.full(100_000, 1, "f4")
reader.wait_event(owner.record())
with reader:
    roots = cupy.sqrt(numbers)

# WRONG if race: the pool knows only the stream that owns the memory.
if not race:
    owner.wait_event(reader.record())
del numbers
with owner:
    others = cupy.full(100_000, 2, "f4")
cupy.cuda.Device().synchronize()
