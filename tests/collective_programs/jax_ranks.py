"""A sum over two GPUs in one process of JAX, which calls NCCL: python jax_ranks.py"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def main() -> None:
    mesh = Mesh(jax.devices()[:2], ("ranks",))
    sharded, replicated = (
        NamedSharding(mesh, PartitionSpec("ranks")),
        NamedSharding(mesh, PartitionSpec()),
    )
    values = jax.device_put(jnp.ones((2, 1 << 24)), sharded)
    add = jax.jit(lambda rows: rows.sum(axis=0) * 2, out_shardings=replicated)
    gather = jax.jit(lambda rows: rows + 1, out_shardings=replicated)
    for _ in range(4):
        total, gathered = add(values), gather(values)
    print(float(total[0]), float(gathered[1, 0]))


if __name__ == "__main__":
    main()
