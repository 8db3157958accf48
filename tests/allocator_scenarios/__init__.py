"""Scenarios of a caching allocator that run on cudakit's, in memory or on a GPU, and on PyTorch's.

``scripts/compare_allocator.py`` runs them on a GPU beside PyTorch, the tests on a device in memory.
"""
