"""A real device, composed of its components."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

from cudakit.errors import CudaError, EnvironmentUnusable
from cudakit.gpu import probe_child
from cudakit.gpu.api import Storage, Stream
from cudakit.gpu.api.collectives import CollectiveLibrary, CollectiveLibraryName
from cudakit.gpu.api.facts import CudaView, DeviceFacts, Process, Telemetry, attributes
from cudakit.gpu.api.gemm import ArrayLibraryName, Blas, Library, OperationLibrary
from cudakit.gpu.cuda.driver import Context, cu
from cudakit.gpu.cuda.memory import CudaMemory, CudaPeers
from cudakit.gpu.cuda.streams import CudaGraphs, CudaKernels, CudaStreams, HandleStreams
from cudakit.gpu.cuda.virtual import CudaIpc, CudaVirtualMemory
from cudakit.gpu.device import Device
from cudakit.gpu.nvml import Nvml, open_nvml
from cudakit.gpu.probe import cuda_view
from cudakit.units import Unavailable

_T = TypeVar("_T")


class Cuda(Device):
    """A CUDA device by index, on its primary context; any thread may call it.

    With ``foreign_streams``, stream ids are driver handles, so that streams of torch, CuPy, Numba and
    cuda.core can be passed. Raises EnvironmentUnusable without a driver, CudaError if initialization fails.
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
        """Query all attributes from the driver (``gpu.api.attributes``)."""
        driver_facts = probe_child.query_driver([attribute.number for attribute in attributes()])
        # Keys are strings, as in the JSON with which the child process of ``probe`` answers.
        view = cuda_view(
            json.loads(json.dumps(driver_facts)), None, visible_devices=None, device_order=None
        )
        if not isinstance(view, CudaView) or self.ordinal >= len(view.devices):
            raise EnvironmentUnusable(f"the driver reports nothing about {self.name}: {view}")
        return view.devices[self.ordinal]

    def telemetry(self, names: Collection[str] = ()) -> Telemetry:
        """Read all telemetry fields, or only ``names``, from NVML; without NVML, read only memory use.

        All fields take milliseconds, one field tens of microseconds.
        """
        if self._read_telemetry is None:
            nvml_device = self._find_in_nvml()  # initializes NVML
            self._read_telemetry = (
                partial(_return_unavailable, nvml_device)
                if isinstance(nvml_device, Unavailable)
                else partial(nvml_device[0].telemetry, nvml_device[1])
            )
        telemetry = self._read_telemetry(names)
        return self._memory_telemetry() if isinstance(telemetry, Unavailable) else telemetry

    def processes(self) -> tuple[Process, ...] | Unavailable:
        """Return the processes that use the device, from NVML."""
        nvml_device = self._find_in_nvml()
        return (
            nvml_device
            if isinstance(nvml_device, Unavailable)
            else nvml_device[0].processes(nvml_device[1])
        )

    def blas(self, library: Library = "cublaslt") -> Blas:
        """Open a GEMM library.

        Raises MissingDependency with the package to install, EnvironmentUnusable if torch was built without
        CUDA.
        """
        from cudakit.gpu import vendor

        match library:
            case "torch":
                from cudakit.gpu.blas.frameworks import TorchBlas

                return TorchBlas(self, vendor.load_torch())
            case "cupy":
                from cudakit.gpu.blas.frameworks import CupyBlas

                return CupyBlas(self, vendor.load_cupy())
            case "cublas":
                from cudakit.gpu.blas.cublas import Cublas

                return Cublas(self, vendor.load_nvmath())
            case "cublaslt":
                from cudakit.gpu.blas.cublaslt import CublasLt

                return CublasLt(self, vendor.load_nvmath(), self.context.capability)

    def collectives(self, library: CollectiveLibraryName = "nccl") -> CollectiveLibrary:
        """Open NCCL or torch. Raises MissingDependency with the package to install."""
        from cudakit.gpu.collectives import open_collectives

        return open_collectives(self, library)

    def array_library(self, name: ArrayLibraryName) -> OperationLibrary:
        """Open torch or CuPy. Raises MissingDependency with the package to install."""
        from cudakit.gpu.array_libraries import open_array_library

        return open_array_library(self, name)

    def storage(self) -> Storage:
        """Open cuFile. Raises MissingDependency with the package to install."""
        from cudakit.gpu.cuda.storage import CuFile

        return CuFile(self)

    def in_context(self, function: Callable[..., _T], *args: object) -> _T:
        """Call a function with this device's context current; restore the previous context."""
        return self.context.in_context(function, *args)

    def stream_address(self, stream: Stream) -> int:
        """Return the driver handle of a stream as an int, for other libraries."""
        return self.streams.address(stream)

    def close(self) -> None:
        """Wait for work on the remaining resources, and release the resources. A second call has no effect.

        cuCtxSynchronize would invalidate stream captures of other libraries, and is called only if modules,
        mappings, IPC memory, or registered or pageable host memory remain; cuMemFree waits for all work
        itself.
        """
        if self.closed:
            return
        must_sync = self.ipc.in_use or self.virtual.in_use or self.kernels.in_use
        with ExitStack() as stack:
            with suppress(CudaError):  # the context may have a sticky error
                stack.enter_context(self.streams.relaxed())
            if must_sync or self.memory.has_unsynchronized_host_memory:
                self.in_context(cu.cuCtxSynchronize)
            self.ipc.close()
            self.virtual.close()
            self.memory.close()
            self.peers.close()
            self.kernels.close()
            self.graphs.close()
            self.streams.close()
        self.context.close()

    def _memory_telemetry(self) -> Telemetry:
        memory_info = self.memory_info()
        fields = {
            "memory_free_bytes": memory_info.free_bytes,
            "memory_used_bytes": memory_info.total_bytes - memory_info.free_bytes,
        }
        return Telemetry(time.time_ns(), fields)

    def _find_in_nvml(self) -> tuple[Nvml, DeviceFacts] | Unavailable:
        """Initialize NVML, and find this device by its UUID."""
        nvml = open_nvml()
        if isinstance(nvml, Unavailable):
            return nvml
        uuid = self.facts().uuid
        for device in nvml.view().devices:
            if device.uuid == uuid:
                return nvml, device
        return Unavailable("NVML does not list the device")


def _return_unavailable(reason: Unavailable, names: Collection[str]) -> Unavailable:  # noqa: ARG001
    return reason
