"""Counters are reset to zero on a side stream while a kernel on the default stream may still sum them."""

import cupy

side = cupy.cuda.Stream(non_blocking=True)
counters = cupy.arange(1 << 22, dtype="i8")
cupy.cuda.get_current_stream().synchronize()

total = counters.sum()
with side:
    # WRONG: the sum runs on the default stream, and may not have read the counters yet.
    counters.fill(0)

print(f"sum: {int(total)}")
side.synchronize()
