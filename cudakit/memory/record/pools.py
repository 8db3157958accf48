"""The pools of GPU memory that cudakit records besides PyTorch's, and their ids in snapshots."""

from __future__ import annotations

from typing import TypeAlias

PoolId: TypeAlias = tuple[int, int]

# Names of the pools of memory that the driver returned, but that no recorded library divides into blocks.
DRIVER = "driver"
MANAGED = "managed memory"
JAX = "jax"

_POOL_NAMES = (DRIVER, MANAGED, "cupy", "numba", "rmm", JAX)
# The first pool id of cudakit. PyTorch counts its pools from 1: (n, 0) is the pool of a CUDA graph,
# and (0, n) is a MemPool.
_FIRST_POOL_ID = 1 << 20

POOL_IDS: dict[str, PoolId] = {
    name: (0, _FIRST_POOL_ID + index) for index, name in enumerate(_POOL_NAMES)
}
POOL_NAMES: dict[PoolId, str] = {pool_id: name for name, pool_id in POOL_IDS.items()}


def pool_name(pool: PoolId) -> str:
    """Return the name of a pool: the default pool, that of a graph (n, 0), a MemPool (0, n), or a library."""
    if pool == (0, 0):
        return "default"
    if pool in POOL_NAMES:
        return POOL_NAMES[pool]
    return f"graph {pool[0]},{pool[1]}" if pool[0] else f"MemPool {pool[0]},{pool[1]}"
