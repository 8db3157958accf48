"""A caching allocator that means what PyTorch's means, without torch."""
