"""The pools of GPU memory that cudakit records besides PyTorch's, and their ids in snapshots."""

from __future__ import annotations

from typing import TypeAlias

PoolId: TypeAlias = tuple[int, int]

# Memory that was allocated from the driver by no recorded pool.
DRIVER = "driver"
MANAGED = "managed memory"
JAX = "jax"

_NAMES = (DRIVER, MANAGED, "cupy", "numba", "rmm", JAX)
# PyTorch numbers its own pools from 1: (n, 0) is the pool of a graph, (0, n) a MemPool.
_FIRST_ID = 1 << 20

POOL_IDS: dict[str, PoolId] = {name: (0, _FIRST_ID + index) for index, name in enumerate(_NAMES)}
POOL_NAMES: dict[PoolId, str] = {pool_id: name for name, pool_id in POOL_IDS.items()}
