"""A simulated device: the protocols, rules of order and errors of the real one, without a GPU.

``Sim()`` is the device; ``@host_kernel("name")`` makes a function of numpy run in place of a kernel. Time is
virtual, and nothing here is a measurement.
"""

from __future__ import annotations

from cudakit.gpu.api.host_kernels import Launch, host_kernel
from cudakit.gpu.sim.device import Sim

__all__ = ["Launch", "Sim", "host_kernel"]
