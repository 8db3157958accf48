"""Pinned memory of the host, kept for the next request; its meaning is that of PyTorch's pool."""
