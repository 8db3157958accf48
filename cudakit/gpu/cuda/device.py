"""One real device, composed of its parts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

from cudakit.errors import CudaError, EnvironmentUnusable
from cudakit.gpu.api import Stream
from cudakit.gpu.api.attributes import attributes
from cudakit.gpu.api.facts import CudaView, DeviceFacts, Process, Telemetry
from cudakit.gpu.api.gemm import Blas, Library
from cudakit.gpu.cuda.context import Context
from cudakit.gpu.cuda.driver import cu
from cudakit.gpu.cuda.graphs import CudaGraphs
from cudakit.gpu.cuda.ipc import CudaIpc
from cudakit.gpu.cuda.kernels import CudaKernels
from cudakit.gpu.cuda.memory import CudaMemory
from cudakit.gpu.cuda.peers import CudaPeers
from cudakit.gpu.cuda.streams import CudaStreams, HandleStreams
from cudakit.gpu.cuda.virtual import CudaVirtualMemory
from cudakit.gpu.device import Device
from cudakit.gpu.nvml import Nvml, open_nvml
from cudakit.gpu.probe import child, cuda_view
from cudakit.units import Unavailable

_T = TypeVar("_T")


class Cuda(Device):
    """The device with a CUDA ordinal, on its primary context; may be used from any thread.

    With ``foreign_streams`` ids of streams are the driver's handles, so that streams of torch, CuPy, Numba
    and cuda.core can be used. Raises EnvironmentUnusable without a driver, CudaError if the driver refuses.
    """

    context: Context
    memory: CudaMemory
    peers: CudaPeers
    virtual: CudaVirtualMemory
    ipc: CudaIpc
    streams: CudaStreams
    kernels: CudaKernels
    graphs: CudaGraphs

    def __init__(self, ordinal: int, *, foreign_streams: bool = False) -> None:
        context = self.context = Context(ordinal)
        self.streams = HandleStreams(context) if foreign_streams else CudaStreams(context)
        self.graphs = CudaGraphs(context, self.streams)
        self.kernels = CudaKernels(context, self.streams)
        self.peers = CudaPeers(context, self.streams)
        self.memory = CudaMemory(context, self.streams)
        self.virtual = CudaVirtualMemory(context, self.memory)
        self.ipc = CudaIpc(context, self.memory, self.virtual)
        self._read_telemetry: Callable[[Collection[str]], Telemetry | Unavailable] | None = None

    @property
    def simulated(self) -> bool:
        return False

    def facts(self) -> DeviceFacts:
        """Ask the driver for all that it knows of the device; fields as in ``gpu.api.attributes``."""
        found = child.answer([attribute.number for attribute in attributes()])
        # The answer of the child process is JSON, whose keys are strings.
        view = cuda_view(
            json.loads(json.dumps(found)), None, visible_devices=None, device_order=None
        )
        if not isinstance(view, CudaView) or self.ordinal >= len(view.devices):
            raise EnvironmentUnusable(f"the driver reports nothing about {self.name}: {view}")
        return view.devices[self.ordinal]

    def telemetry(self, names: Collection[str] = ()) -> Telemetry:
        """Read telemetry, or only ``names`` of it, from NVML; only memory if NVML does not know the device.

        All fields take milliseconds, one field some ten microseconds.
        """
        if self._read_telemetry is None:
            found = self._find_in_nvml()  # starts NVML once
            self._read_telemetry = (
                partial(_unavailable, found)
                if isinstance(found, Unavailable)
                else partial(found[0].telemetry, found[1])
            )
        answer = self._read_telemetry(names)
        return self._memory_only() if isinstance(answer, Unavailable) else answer

    def processes(self) -> tuple[Process, ...] | Unavailable:
        """Ask NVML which processes use the device."""
        found = self._find_in_nvml()
        return found if isinstance(found, Unavailable) else found[0].processes(found[1])

    def blas(self, library: Library = "cublaslt") -> Blas:
        """Open a library that multiplies matrices. Raises MissingDependency with what to install."""
        from cudakit.gpu.blas import open_blas

        return open_blas(self, library, self.context.capability)

    def ask(self, function: Callable[..., _T], *args: object) -> _T:
        """Call a function with this device's context current in this thread; leave the thread as it was."""
        return self.context.ask(function, *args)

    def stream_address(self, stream: Stream) -> int:
        """Return the driver's handle of a stream as the number that other libraries take."""
        return self.streams.address(stream)

    def close(self) -> None:
        """Wait for the work that uses what is left, and release it. A second time has no effect.

        With plain memory, streams and events alone, graph captures of other libraries go on: the driver waits
        in cuMemFree by itself, and cuCtxSynchronize, which ends every capture, is not called.
        """
        if self.closed:
            return
        waits = self.ipc.in_use or self.virtual.in_use or self.kernels.in_use
        with ExitStack() as stack:
            with suppress(CudaError):  # a sticky error of the context
                stack.enter_context(self.streams.relaxed())
            if waits or self.memory.is_registered:
                self.ask(cu.cuCtxSynchronize)
            self.ipc.close()
            self.virtual.close()
            self.memory.close()
            self.peers.close()
            self.kernels.close()
            self.graphs.close()
            self.streams.close()
        self.context.close()

    def _memory_only(self) -> Telemetry:
        info = self.memory_info()
        fields = {
            "memory_free_bytes": info.free_bytes,
            "memory_used_bytes": info.total_bytes - info.free_bytes,
        }
        return Telemetry(time.time_ns(), fields)

    def _find_in_nvml(self) -> tuple[Nvml, DeviceFacts] | Unavailable:
        """Start NVML, and find this device there by its UUID."""
        nvml = open_nvml()
        if isinstance(nvml, Unavailable):
            return nvml
        uuid = self.facts().uuid
        for device in nvml.view().devices:
            if device.uuid == uuid:
                return nvml, device
        return Unavailable("NVML does not list the device")


def _unavailable(reason: Unavailable, names: Collection[str]) -> Unavailable:  # noqa: ARG001
    return reason
