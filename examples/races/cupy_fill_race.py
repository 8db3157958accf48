"""Counters are set back to zero on one stream while a kernel on another may still add them up."""

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
