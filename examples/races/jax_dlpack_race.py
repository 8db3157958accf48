"""A result of JAX is handed to PyTorch, and used there on another stream than it was handed to.

JAX orders its own work itself. At the hand-over it makes PyTorch's current stream wait for the result, that
one and no other: the copy on the side stream may begin before JAX has computed anything.
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
host.copy_(torch.from_dlpack(many_waves().block_until_ready()))  # compiles it, and is waited for

wave = many_waves()  # is at work while the rest is enqueued
result = torch.from_dlpack(wave)
with torch.cuda.stream(side):
    # WRONG: JAX was told of the current stream at the hand-over, which was not this one.
    host.copy_(result, non_blocking=True)

side.synchronize()
print(f"last: {host[-1]:.6f}")
