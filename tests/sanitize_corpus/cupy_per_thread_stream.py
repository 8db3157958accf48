"""race: A kernel of the per-thread default stream runs beside one of an ordinary stream.

fixed: The legacy default stream runs between the per-thread default stream and an ordinary one.
"""

import sys

import cupy

race = sys.argv[1] == "race"

side, own = cupy.cuda.Stream(), cupy.cuda.Stream.ptds
numbers, others = cupy.ones(10_000, "f4"), cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with own:
    numbers += 1
if not race:
    others *= 2  # on the legacy default stream
with side:
    # WRONG if race: the thread's own default stream is an ordinary stream like this one.
    numbers *= 2
cupy.cuda.Device().synchronize()
