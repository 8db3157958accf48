"""A result of JAX is handed to PyTorch on the stream that uses it."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch

side = torch.cuda.Stream()
host = torch.empty(1 << 22, pin_memory=True)

wave = jax.jit(lambda: jnp.sin(jnp.arange(1 << 22, dtype=jnp.float32)))()
with torch.cuda.stream(side):
    result = torch.from_dlpack(wave)
    host.copy_(result, non_blocking=True)

side.synchronize()
print(f"last: {host[-1]:.6f}")
