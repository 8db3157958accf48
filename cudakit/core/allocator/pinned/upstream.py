"""What the pool needs of a device, and a Gpu that gives it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from cudakit.gpu.api import LEGACY, Event, Memory, Ptr, Stream, Streams


class HostUpstream(Protocol):
    """Where pinned memory comes from. Every call that fails raises a CudaError; no memory: of code 2."""

    def malloc(self, size_bytes: int) -> int: ...
    def free(self, ptr: int) -> None: ...
    def event(self) -> Event: ...
    def destroy_event(self, event: Event) -> None: ...
    def record(self, event: Event, stream: int) -> None: ...
    def query_event(self, event: Event) -> bool: ...
    def sync_event(self, event: Event) -> None: ...
    def sync(self) -> None: ...


@runtime_checkable
class Registering(Protocol):
    """An upstream that may also pin memory after the host gave it: the driver locks less for that."""

    def malloc_registered(self, size_bytes: int, threads: int) -> int: ...


class HostMemoryDevice(Memory, Streams, Protocol):
    """A device that host memory is pinned for."""


class PinnedOfGpu:
    """Memory of the host that a device reaches (cuMemHostAlloc, cuMemHostRegister), whatever is captured.

    Each is given back as it was taken, whatever the settings are by then, as PyTorch's pool does
    (aten/src/ATen/cuda/CachingHostAllocator.cpp, free_block).
    """

    def __init__(self, gpu: HostMemoryDevice) -> None:
        self._gpu = gpu
        self._registered: set[int] = set()
        self.destroy_event = gpu.destroy_event
        self.query_event = gpu.query_event
        self.sync_event = gpu.sync_event
        self.sync = gpu.sync

    def malloc(self, size_bytes: int) -> int:
        with self._gpu.relaxed():
            return self._gpu.host_malloc(size_bytes, pinned=True)

    def malloc_registered(self, size_bytes: int, threads: int) -> int:
        with self._gpu.relaxed():
            ptr = self._gpu.host_malloc(size_bytes, pinned=False)
            try:
                self._gpu.host_register(ptr, threads=threads)
            except BaseException:
                self._gpu.host_free(ptr)
                raise
        self._registered.add(ptr)
        return ptr

    def free(self, ptr: int) -> None:
        if ptr in self._registered:
            self._gpu.host_unregister(Ptr(ptr))
            self._registered.discard(ptr)
        self._gpu.host_free(Ptr(ptr))

    def event(self) -> Event:
        return self._gpu.event(timing=False)

    def record(self, event: Event, stream: int) -> None:
        # As for memory of the device: the legacy stream waits for the default stream of any thread.
        self._gpu.record(event, Stream(stream) if stream > 0 else LEGACY)
