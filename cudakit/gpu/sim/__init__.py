"""A simulated device: the same protocol, rules of order and errors as the real one, without a GPU.

``Sim()`` is the device, ``@twin("name")`` makes a function of numpy stand in for a kernel. Time is virtual,
and nothing here is a measurement.
"""

from __future__ import annotations

from cudakit.gpu.sim.device import Sim
from cudakit.gpu.sim.twins import Launch, twin

__all__ = ["Launch", "Sim", "twin"]
