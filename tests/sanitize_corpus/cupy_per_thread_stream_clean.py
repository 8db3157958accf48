"""The legacy default stream runs between the per-thread default stream and an ordinary one."""

import cupy

side, own = cupy.cuda.Stream(), cupy.cuda.Stream.ptds
numbers, others = cupy.ones(10_000, "f4"), cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with own:
    numbers += 1
others *= 2  # on the legacy default stream
with side:
    numbers *= 2
cupy.cuda.Device().synchronize()
