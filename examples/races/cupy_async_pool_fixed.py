"""Memory is allocated in the order of one stream, and used on another one that waits for the allocation."""

import cupy

cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)

with first:
    table = cupy.empty(1 << 22, dtype="f4")
second.wait_event(first.record())
with second:
    table.fill(0)
    total = float(table.sum())

print(f"sum: {total:.0f}")
