"""One real device: everything of the Gpu protocol."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import SupportsInt, cast

from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.api import Stream
from cudakit.gpu.api.attributes import attributes
from cudakit.gpu.api.facts import CudaView, DeviceFacts, Telemetry
from cudakit.gpu.api.gemm import Blas, Library
from cudakit.gpu.cuda.captures import Captures
from cudakit.gpu.cuda.driver import cu
from cudakit.gpu.cuda.kernels import Kernels
from cudakit.gpu.cuda.sharing import Sharing
from cudakit.gpu.nvml import open_nvml
from cudakit.gpu.probe import child
from cudakit.gpu.probe.answer import cuda_view
from cudakit.units import Unavailable


class Cuda(Sharing, Kernels, Captures):
    """The device with a number of CUDA's, on its primary context; may be used from any thread.

    Raises EnvironmentUnusable without a driver, CudaError where the driver refuses.
    """

    simulated = False
    _ask_nvml: Callable[[Collection[str]], Telemetry | Unavailable] | None = None

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

    def telemetry(self, names: Collection[str] = ()) -> Telemetry:
        """Read what moves, or ``names`` of it, from NVML; where it does not know the device, the memory.

        All of it takes milliseconds, one name some ten microseconds.
        """
        if self._ask_nvml is None:
            self._ask_nvml = _telemetry_of(self.facts().uuid)
        answer = self._ask_nvml(names)
        return self._memory_only() if isinstance(answer, Unavailable) else answer

    def blas(self, library: Library = "cublaslt") -> Blas:
        """Open a library that multiplies matrices. Raises MissingDependency with what to install."""
        from cudakit.gpu.blas.open import open_blas

        return open_blas(self, library)

    def stream_address(self, stream: Stream) -> int:
        """Return the driver's own handle of a stream, as the number that other libraries take."""
        return int(cast(SupportsInt, self.handle(stream)))

    def close(self) -> None:
        """Wait for all work, and give back what was not. A second time does nothing."""
        if not self.closed:
            self.ask(cu.cuCtxSynchronize)
            super().close()

    def _memory_only(self) -> Telemetry:
        info = self.memory_info()
        fields = {
            "memory_free_bytes": info.free_bytes,
            "memory_used_bytes": info.total_bytes - info.free_bytes,
        }
        return Telemetry(time.time_ns(), fields)


def _telemetry_of(
    uuid: str | Unavailable,
) -> Callable[[Collection[str]], Telemetry | Unavailable]:
    """Return how to read the telemetry of a device: NVML is started, and the device found, once."""
    library = open_nvml()
    if isinstance(library, Unavailable):
        missing = library
        return lambda names: missing  # noqa: ARG005
    for device in library.view().devices:
        if device.uuid == uuid:
            return partial(library.telemetry, device)
    return lambda names: Unavailable("NVML does not list the device")  # noqa: ARG005
