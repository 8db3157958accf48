"""Counters are reset to zero on a side stream after a kernel on the default stream has summed them."""

import cupy

side = cupy.cuda.Stream(non_blocking=True)
counters = cupy.arange(1 << 22, dtype="i8")
cupy.cuda.get_current_stream().synchronize()

total = counters.sum()
side.wait_event(cupy.cuda.get_current_stream().record())
with side:
    counters.fill(0)

print(f"sum: {int(total)}")
side.synchronize()
