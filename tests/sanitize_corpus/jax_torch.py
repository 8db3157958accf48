"""race: A JAX array is passed to PyTorch on one stream, and a kernel on another one reads it.

fixed: A JAX array is passed to PyTorch on the stream of the kernel that reads it.
"""

import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch

race = sys.argv[1] == "race"

side = torch.cuda.Stream()
many_waves = jax.jit(lambda: jnp.sin(jnp.arange(1 << 28, dtype=jnp.float32)))
many_waves().block_until_ready()  # compile it, and load the kernel of torch
torch.ones(8, device="cuda").mul(2)
torch.cuda.synchronize()

wave = many_waves()  # still runs while the rest is enqueued
if race:
    result = torch.from_dlpack(wave)  # WRONG: on the current stream, not the side stream
with torch.cuda.stream(side):
    if not race:
        result = torch.from_dlpack(wave)
    doubled = result * 2
torch.cuda.synchronize()
wave.block_until_ready()
