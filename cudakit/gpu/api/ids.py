"""Plain values that calls on a device take and return: addresses, ids, launch shapes, sizes.

An id is a number that means something only to the device that returned it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType, TypeAlias

if TYPE_CHECKING:
    import numpy as np  # slow to import; commands that launch no kernel do without it

Ptr = NewType("Ptr", int)  # an address of the device, or of host memory
Backing = NewType("Backing", int)  # a reference to physical memory that can be mapped
Stream = NewType("Stream", int)
Event = NewType("Event", int)
Module = NewType("Module", int)
Kernel = NewType("Kernel", int)
Graph = NewType("Graph", int)
GraphExec = NewType("GraphExec", int)
GraphNode = NewType("GraphNode", int)

# CU_STREAM_LEGACY and CU_STREAM_PER_THREAD (CUDA Driver API, data types).
LEGACY = Stream(1)
PER_THREAD = Stream(2)

# A kernel argument: a Ptr is passed as an address, a numpy scalar with its own width.
Argument: TypeAlias = "Ptr | np.generic"
Dim3: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Free and total bytes of a device's memory (cuMemGetInfo)."""

    free_bytes: int
    total_bytes: int
