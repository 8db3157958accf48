"""Ids: plain numbers that mean something to the Gpu that gave them only."""

from __future__ import annotations

from typing import NewType

Ptr = NewType("Ptr", int)  # an address of the device, or of memory of the host
Backing = NewType("Backing", int)  # physical memory that can be mapped
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
