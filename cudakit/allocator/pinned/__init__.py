"""The allocator of pinned host memory: the engine of device memory with another upstream."""
