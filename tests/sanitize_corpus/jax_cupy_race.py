"""A result of JAX is handed to CuPy on the default stream, and changed on a non-blocking one."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import cupy
import jax
import jax.numpy as jnp

side = cupy.cuda.Stream(non_blocking=True)
wave = jax.jit(lambda: jnp.sin(jnp.arange(1 << 20, dtype=jnp.float32)))()
result = cupy.from_dlpack(wave)  # WRONG: for the default stream
with side:
    result *= 2
cupy.cuda.Device().synchronize()
wave.block_until_ready()
