"""A result of JAX is handed to PyTorch on the stream of the kernel that reads it."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch

side = torch.cuda.Stream()
wave = jax.jit(lambda: jnp.sin(jnp.arange(1 << 20, dtype=jnp.float32)))()
with torch.cuda.stream(side):
    result = torch.from_dlpack(wave)
    doubled = result * 2
torch.cuda.synchronize()
wave.block_until_ready()
