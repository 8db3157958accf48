"""An array is copied to the GPU on a non-blocking stream, and the default stream waits for the copy."""

import cupy
import cupyx

side = cupy.cuda.Stream(non_blocking=True)
host = cupyx.empty_pinned(1 << 22, dtype="f4")
host[:] = 1
batch = cupy.empty(host.shape, host.dtype)

batch.set(host, stream=side)
cupy.cuda.get_current_stream().wait_event(side.record())
total = batch.sum()

print(f"sum: {float(total):.0f}")
side.synchronize()
