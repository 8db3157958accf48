"""race: A kernel on the per-thread default stream runs concurrently with one on a blocking stream.

fixed: Work on the legacy default stream orders the per-thread default stream and a blocking stream.
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
    # WRONG if race: the per-thread default stream is a blocking stream like this one.
    numbers *= 2
cupy.cuda.Device().synchronize()
