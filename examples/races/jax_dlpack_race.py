"""A JAX array is passed to PyTorch on one stream, and used on another.

JAX orders its own work. ``from_dlpack`` makes PyTorch's current stream wait for the JAX array, and no other
stream. The copy on the side stream may start before JAX has computed the array.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch

side = torch.cuda.Stream()
host = torch.empty(1 << 22, pin_memory=True)

many_waves = jax.jit(
    lambda: jnp.sin(jnp.arange(1 << 30, dtype=jnp.float32)).reshape(1 << 22, -1).sum(1)
)
host.copy_(torch.from_dlpack(many_waves().block_until_ready()))  # compile the function first

wave = many_waves()  # still runs while the copy is enqueued
result = torch.from_dlpack(wave)
with torch.cuda.stream(side):
    # WRONG: from_dlpack made another stream wait for JAX, not this one.
    host.copy_(result, non_blocking=True)

side.synchronize()
print(f"last: {host[-1]:.6f}")
