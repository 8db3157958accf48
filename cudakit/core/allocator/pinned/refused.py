"""What a pool of pinned memory refuses."""

from __future__ import annotations

from collections.abc import Mapping

from cudakit.core.allocator.pinned.supply import OUT_OF_MEMORY
from cudakit.errors import CudaError
from cudakit.units import format_bytes


class OutOfPinnedMemory(CudaError, MemoryError):
    """The driver has no pinned memory for a request, even after all that was cached was given back."""


def out_of_pinned_memory(
    size_bytes: int, counters: Mapping[str, int], held: int, *, reserve: bool = False
) -> OutOfPinnedMemory:
    """Make the error; ``counters`` are those of the pool, which holds ``held`` bytes."""
    use = " as the reserve (pinned_reserve_segment_size_mb)" if reserve else ""
    parts = [
        f"tried to allocate {format_bytes(size_bytes)} of pinned memory{use}; this pool holds"
        f" {format_bytes(held)}, of which {format_bytes(counters['free_bytes'])} is free"
    ]
    if waiting := counters["waiting_bytes"]:
        parts.append(f"{format_bytes(waiting)} was freed but is in use by streams")
    if captured := counters["captured_bytes"]:
        parts.append(f"{format_bytes(captured)} was freed but may be used by graphs")
    return OutOfPinnedMemory(
        OUT_OF_MEMORY,
        "CUDA_ERROR_OUT_OF_MEMORY",
        "; ".join(parts),
        hint="pinned memory is memory of the host that cannot be swapped out: free some, or copy in pieces",
    )
