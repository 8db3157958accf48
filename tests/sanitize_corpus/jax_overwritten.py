"""race: PyTorch modifies a JAX array while JAX still computes with it.

fixed: PyTorch modifies a JAX array after JAX has computed with it.
"""

import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch

race = sys.argv[1] == "race"

side = torch.cuda.Stream()
numbers = jnp.arange(1 << 28, dtype=jnp.float32).block_until_ready()
shared = torch.from_dlpack(numbers)
waves_of = jax.jit(lambda x: jnp.sin(x) * 2)
waves_of(numbers).block_until_ready()  # compile it, and load the kernel of torch
torch.ones(8, device="cuda").mul_(2)
torch.cuda.synchronize()

wave = waves_of(numbers)  # still runs while the rest is enqueued
if not race:
    wave.block_until_ready()
with torch.cuda.stream(side):
    shared.mul_(2)  # WRONG if race: nothing waits for JAX
torch.cuda.synchronize()
wave.block_until_ready()
