"""A device whose streams are those of other libraries: a stream's id is the driver's handle of it."""

from __future__ import annotations

from cudakit.gpu.api import LEGACY, PER_THREAD, Stream
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
