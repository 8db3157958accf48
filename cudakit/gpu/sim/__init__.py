"""A simulated device: the protocols, rules of order and errors of the real one, without a GPU.

``Sim()`` is the device; ``@host_kernel("name")`` makes a function of numpy run in place of a kernel. Time is
virtual, and nothing here is a measurement.
"""

from __future__ import annotations

from cudakit.gpu.sim.device import Sim
from cudakit.gpu.sim.host_kernels import Launch, host_kernel

__all__ = ["Launch", "Sim", "host_kernel"]
