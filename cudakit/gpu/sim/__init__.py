"""A simulated device: the protocols, stream ordering and errors of a real one, without a GPU.

``Sim()`` is the device; ``@host_kernel("name")`` registers a numpy function that runs in place of a kernel.
Time is virtual: durations are estimates, not measurements.
"""

from __future__ import annotations

from cudakit.gpu.api.arrays import Launch, host_kernel
from cudakit.gpu.sim.device import Sim

__all__ = ["Launch", "Sim", "host_kernel"]
