"""race: A JAX array is passed to CuPy on the default stream, and modified on a non-blocking one.

fixed: A JAX array is passed to CuPy on the stream that modifies it.
"""

import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import cupy
import jax
import jax.numpy as jnp

race = sys.argv[1] == "race"

side = cupy.cuda.Stream(non_blocking=True)
many_waves = jax.jit(lambda: jnp.sin(jnp.arange(1 << 28, dtype=jnp.float32)))
many_waves().block_until_ready()  # compile both kernels first
few = cupy.ones(8, "f4")
few *= 2
cupy.cuda.Device().synchronize()

wave = many_waves()  # still runs while the rest is enqueued
if race:
    result = cupy.from_dlpack(wave)  # WRONG: on the default stream
with side:
    if not race:
        result = cupy.from_dlpack(wave)
    result *= 2
cupy.cuda.Device().synchronize()
wave.block_until_ready()
