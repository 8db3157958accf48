"""One simulated device: everything of the Gpu protocol."""

from __future__ import annotations

from collections.abc import Collection

from cudakit.gpu.api.facts import DeviceFacts, Telemetry
from cudakit.gpu.api.gemm import Blas, Library
from cudakit.gpu.sim.context import driver_call
from cudakit.gpu.sim.graphs import Graphs
from cudakit.gpu.sim.kernels import Kernels
from cudakit.gpu.sim.sharing import Sharing


class Sim(Sharing, Kernels, Graphs):
    """A device of a recorded machine, simulated; may be used from any thread. See ``Context`` for options.

    ``capacity_bytes`` replaces the size of its memory, ``twins`` are kernels that only this device has. Each
    is one of a simulated process of its own; those of the machine of another one are made ``beside`` it.
    ``handle_kinds`` are the ways in which it exports memory to them.
    """

    simulated = True

    def facts(self) -> DeviceFacts:
        """Return what was recorded of the device."""
        return self._facts

    @driver_call
    def telemetry(self, names: Collection[str] = ()) -> Telemetry:
        """Say what the simulator knows of the moment, at its own time: bytes of memory."""
        fields = {
            "memory_free_bytes": self._capacity_bytes - self._used_bytes,
            "memory_used_bytes": self._used_bytes,
        }
        wanted = {name: known for name, known in fields.items() if not names or name in names}
        return Telemetry(self.clock.now_ns, wanted)

    def blas(self, library: Library = "cublaslt") -> Blas:
        """Open a simulated library that multiplies matrices."""
        from cudakit.gpu.sim.blas import SimBlas

        return SimBlas(self, library)
