"""A device in memory with virtual memory, whose calls can fail."""

from __future__ import annotations

from allocator.device import MIB, Device

from cudakit.errors import CudaError


class Pages:
    """Virtual memory that raises the errors of a driver."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device

    def granularity(self) -> int:
        self._device.call("granularity")
        return 2 * MIB

    def reserve(self, size_bytes: int) -> int:
        self._device.call("reserve")
        ptr = self._device.addresses(size_bytes)
        self._device.reserved[ptr] = size_bytes
        return ptr

    def unreserve(self, ptr: int, size_bytes: int) -> None:
        self._device.call("unreserve")
        assert self._device.reserved[ptr] == size_bytes
        assert not [page for page in self._device.mapped if ptr <= page < ptr + size_bytes]
        del self._device.reserved[ptr]

    def map(self, ptr: int, page_bytes: int, count: int) -> None:
        device = self._device
        device.call("map")
        addresses = range(ptr, ptr + count * page_bytes, page_bytes)
        assert count > 0
        assert not device.mapped.keys() & set(addresses)
        assert [b for b, size in device.reserved.items() if b <= ptr and addresses.stop <= b + size]
        if device.used + count * page_bytes > device.capacity:
            raise CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "the device is full")
        device.mapped |= dict.fromkeys(addresses, page_bytes)

    def unmap(self, ptr: int, size_bytes: int) -> None:
        device = self._device
        device.call("unmap")
        assert device.synchronized, "nothing waited for who uses the memory"
        device.synchronized = False
        address = ptr
        while address < ptr + size_bytes:
            address += device.mapped.pop(address)
        assert address == ptr + size_bytes, "a part of a page"

    def sync_stream(self, stream: int) -> None:  # noqa: ARG002
        self._device.call("sync_stream")
        self._device.synchronized = True


class VirtualDevice(Device):
    """A Device with pages."""

    def __init__(self, *args: int, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.synchronized = False
        self.pages = Pages(self)

    @property
    def used(self) -> int:
        return sum(self.held.values()) + sum(self.mapped.values())

    def addresses(self, size_bytes: int) -> int:
        """Return unused addresses."""
        ptr, self._next = self._next, self._next + size_bytes + 2 * MIB
        return ptr

    def call(self, name: str) -> None:
        """Count a driver call, and raise an error if the test selected that call."""
        self._call(name)
