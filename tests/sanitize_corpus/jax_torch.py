"""race: A result of JAX is handed to PyTorch on one stream, and read by a kernel on another one.

fixed: A result of JAX is handed to PyTorch on the stream of the kernel that reads it.
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
many_waves().block_until_ready()  # so that it is compiled, and the kernel of torch is loaded
torch.ones(8, device="cuda").mul(2)
torch.cuda.synchronize()

wave = many_waves()  # is at work while the rest is enqueued
if race:
    result = torch.from_dlpack(wave)  # WRONG: for the current stream, which is not the side stream
with torch.cuda.stream(side):
    if not race:
        result = torch.from_dlpack(wave)
    doubled = result * 2
torch.cuda.synchronize()
wave.block_until_ready()
