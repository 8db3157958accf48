"""A result of JAX is handed to PyTorch on the stream of the kernel that reads it."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch

side = torch.cuda.Stream()
many_waves = jax.jit(lambda: jnp.sin(jnp.arange(1 << 28, dtype=jnp.float32)))
many_waves().block_until_ready()  # so that it is compiled, and the kernel of torch is loaded
torch.ones(8, device="cuda").mul(2)
torch.cuda.synchronize()

wave = many_waves()  # is at work while the rest is enqueued
with torch.cuda.stream(side):
    result = torch.from_dlpack(wave)
    doubled = result * 2
torch.cuda.synchronize()
wave.block_until_ready()
