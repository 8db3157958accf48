"""One real device: everything of the Gpu protocol."""

from __future__ import annotations

import json
import time

from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.api.attributes import attributes
from cudakit.gpu.api.facts import CudaView, DeviceFacts, Telemetry
from cudakit.gpu.cuda.driver import check, cu
from cudakit.gpu.cuda.graphs import Graphs
from cudakit.gpu.cuda.kernels import Kernels
from cudakit.gpu.cuda.virtual import VirtualMemory
from cudakit.gpu.probe import child
from cudakit.gpu.probe.answer import cuda_view


class Cuda(VirtualMemory, Kernels, Graphs):
    """The device with a number of CUDA's, on its primary context; may be used from any thread.

    Raises EnvironmentUnusable without a driver, CudaError where the driver refuses.
    """

    simulated = False

    def facts(self) -> DeviceFacts:
        """Ask the driver for all that it knows of the device; fields as in ``gpu.api.attributes``."""
        found = child.answer([attribute.number for attribute in attributes()])
        # The child speaks JSON, which has only texts for keys.
        view = cuda_view(
            json.loads(json.dumps(found)), None, visible_devices=None, device_order=None
        )
        if not isinstance(view, CudaView) or self.ordinal >= len(view.devices):
            raise EnvironmentUnusable(f"the driver says nothing of {self.name}: {view}")
        return view.devices[self.ordinal]

    def telemetry(self) -> Telemetry:
        """Say what the driver knows of the moment: bytes of memory. NVML knows the rest."""
        info = self.memory_info()
        fields = {"free_memory_bytes": info.free_bytes, "total_memory_bytes": info.total_bytes}
        return Telemetry(time.time_ns(), fields)

    def close(self) -> None:
        """Wait for all work, and give back what was not. A second time does nothing."""
        if not self.closed:
            self.ask(cu.cuCtxSynchronize)
            super().close()

    def can_access_peer(self, ordinal: int) -> bool:
        """Say whether kernels here can use the memory of another device."""
        other = check(cu.cuDeviceGet(ordinal), lambda: f"cuda:{ordinal} asked")
        return bool(check(cu.cuDeviceCanAccessPeer(self._device, other)))
