"""What a caching allocator does, as operations on any: ours on a device in memory, ours on a GPU, PyTorch's.

``scripts/compare_allocator.py`` runs them on a GPU beside PyTorch, the tests on a device in memory.
"""
