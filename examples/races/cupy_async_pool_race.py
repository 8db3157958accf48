"""Memory that was allocated in the order of one stream is used on another before it exists there.

``MemoryAsyncPool`` allocates with cudaMallocAsync: the memory is there for what comes later in that stream,
and for whoever waits for it. Another stream that does not wait may write to memory of somebody else.
"""

import cupy

cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)

with first:
    table = cupy.empty(1 << 22, dtype="f4")
with second:
    # WRONG: the second stream has not waited for the allocation in the first.
    table.fill(0)
    total = float(table.sum())

print(f"sum: {total:.0f}")
