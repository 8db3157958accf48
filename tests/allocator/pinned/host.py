"""A simulated host that allocates pinned memory. Tests determine which calls fail."""

from __future__ import annotations

from allocator.device import GIB, Device

from cudakit.errors import CudaError

PAGE = 4096


class Host:
    """An upstream that uses a simulated device, with contiguous addresses."""

    def __init__(self, capacity: int = 16 * GIB) -> None:
        self.device = Device(capacity)
        self.record = self.device.record
        self.event = self.device.event
        self.destroy_event = self.device.destroy_event
        self.query_event = self.device.query_event
        self.sync_event = self.device.sync_event
        self.sync = self.device.sync
        self.free = self.device.free
        self.finish = self.device.finish

    def malloc(self, size_bytes: int) -> int:
        return self.device.malloc(size_bytes, 0)

    @property
    def held(self) -> dict[int, int]:
        return self.device.held

    @property
    def calls(self) -> list[str]:
        return self.device.calls

    @property
    def error(self) -> CudaError:
        return self.device.error
