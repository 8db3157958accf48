"""A caching allocator with the blocks, statistics and snapshots of PyTorch's, without PyTorch."""
