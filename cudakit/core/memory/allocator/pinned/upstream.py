"""What the pool needs of a device, and a Gpu that gives it."""

from __future__ import annotations

from typing import Protocol

from cudakit.gpu.api import LEGACY, Event, Gpu, Ptr, Stream


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


class PinnedOfGpu:
    """Memory of the host that a Gpu reaches (cuMemHostAlloc), whatever is captured."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.destroy_event = gpu.destroy_event
        self.query_event = gpu.query_event
        self.sync_event = gpu.sync_event
        self.sync = gpu.sync

    def malloc(self, size_bytes: int) -> int:
        with self._gpu.relaxed():
            return self._gpu.host_malloc(size_bytes, pinned=True)

    def free(self, ptr: int) -> None:
        self._gpu.host_free(Ptr(ptr))

    def event(self) -> Event:
        return self._gpu.event(timing=False)

    def record(self, event: Event, stream: int) -> None:
        # As for memory of the device: the legacy stream waits for the default stream of any thread.
        self._gpu.record(event, Stream(stream) if stream > 0 else LEGACY)
