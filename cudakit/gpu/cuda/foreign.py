"""A device whose streams are those of other libraries: a stream's id is the driver's handle of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cudakit.gpu.api import LEGACY, PER_THREAD, Backing, Ptr, Stream
from cudakit.gpu.api.facts import Process
from cudakit.gpu.cuda.device import Cuda
from cudakit.gpu.cuda.driver import cu
from cudakit.gpu.explain import Status, cuda_error
from cudakit.gpu.nvml import open_nvml
from cudakit.units import Unavailable

_DEFAULT = {0: LEGACY, LEGACY: LEGACY, PER_THREAD: PER_THREAD}


class ForeignStreams(Cuda):
    """A real device that takes the streams of torch, CuPy, Numba and cuda.core by their handles.

    A handle must be alive: the driver cannot tell, and gives the number of a stream that was destroyed to
    another one.
    """

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._own: dict[Stream, Stream] = {}

    def handle(self, stream: Stream) -> object:
        return cu.CUstream(_DEFAULT.get(stream, stream))

    def borrowed(self, handle: int) -> Stream:
        return _DEFAULT.get(handle, Stream(handle))

    def processes(self) -> tuple[Process, ...] | Unavailable:
        """Ask NVML who uses the device."""
        library = open_nvml()
        if isinstance(library, Unavailable):
            return library
        uuid = self.facts().uuid
        for device in library.view().devices:
            if device.uuid == uuid:
                return library.processes(device)
        return Unavailable("NVML does not list the device")

    def malloc(self, size_bytes: int, stream: Stream | None = None) -> Ptr:
        """Allocate as any device does, and also while a stream is captured: it is no part of the graph.

        Other modes of capture refuse cuMemAlloc and break the capture (CUDA Driver API,
        cuThreadExchangeStreamCaptureMode). PyTorch's allocator does the same (CUDAStreamCaptureModeGuard).
        """
        with self._relaxed():
            return super().malloc(size_bytes, stream)

    def create(self, size_bytes: int) -> Backing:
        """Create memory to be mapped, also while a stream is captured, as ``malloc`` does."""
        with self._relaxed():
            return super().create(size_bytes)

    def map(self, ptr: Ptr, backing: Backing, size_bytes: int) -> None:
        """Map memory, also while a stream is captured, as ``malloc`` does."""
        with self._relaxed():
            super().map(ptr, backing, size_bytes)

    @contextmanager
    def _relaxed(self) -> Iterator[None]:
        mode = self.call(
            cu.cuThreadExchangeStreamCaptureMode,
            cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
        )
        try:
            yield
        finally:
            self.call(cu.cuThreadExchangeStreamCaptureMode, mode)

    def stream(self, *, blocking: bool = True, priority: int = 0) -> Stream:
        own = super().stream(blocking=blocking, priority=priority)
        stream = Stream(int(self._streams[own]))
        self._own[stream] = own
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        if stream not in self._own:
            raise cuda_error(
                Status.INVALID_HANDLE,
                seen=f"stream {stream:#x} is another library's, or was destroyed",
            )
        super().destroy_stream(self._own.pop(stream))
