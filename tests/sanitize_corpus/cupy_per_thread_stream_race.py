"""A kernel of the per-thread default stream runs beside one of an ordinary stream."""

import cupy

side, own = cupy.cuda.Stream(), cupy.cuda.Stream.ptds
numbers, others = cupy.ones(10_000, "f4"), cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with own:
    numbers += 1
with side:
    # WRONG: the thread's own default stream is an ordinary stream like this one.
    numbers *= 2
cupy.cuda.Device().synchronize()
