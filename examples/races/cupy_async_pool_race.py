"""Memory is allocated in the order of one stream, and used on another one before it is allocated there.

``MemoryAsyncPool`` allocates with cudaMallocAsync. The memory is valid for later work of that stream and for
streams that wait for it. A stream that does not wait may write to another allocation's memory.
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
