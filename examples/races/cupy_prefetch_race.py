"""An array is copied to the GPU on a non-blocking stream, and summed on the default stream.

The default stream waits implicitly for blocking streams only. Here the sum may read the array before the copy
is complete.
"""

import cupy
import cupyx

side = cupy.cuda.Stream(non_blocking=True)
host = cupyx.empty_pinned(1 << 22, dtype="f4")
host[:] = 1
batch = cupy.empty(host.shape, host.dtype)

batch.set(host, stream=side)
# WRONG: the default stream does not wait for the copy.
total = batch.sum()

print(f"sum: {float(total):.0f}")
side.synchronize()
