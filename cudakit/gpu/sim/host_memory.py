"""Memory of the host: pinned, which the device reaches, and pageable, which only copies do."""

from __future__ import annotations

from typing import Any

from cudakit.gpu.api import Ptr
from cudakit.gpu.explain import Status, cuda_error
from cudakit.gpu.sim.context import driver_call
from cudakit.gpu.sim.memory import Memory, check_size, forget
from cudakit.gpu.sim.space import Region
from cudakit.trace.events import Alloc, Free
from cudakit.trace.kinds import HostMemory as Host
from cudakit.trace.kinds import How
from cudakit.units import format_bytes


class HostMemory(Memory):
    """What this process has of the host's memory; of what is pageable neither driver nor trace know."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._of_host: dict[int, Region] = {}
        self._registered: set[int] = set()

    @driver_call
    def host_malloc(self, size_bytes: int, *, pinned: bool = True) -> Ptr:
        check_size(size_bytes)
        self.refuse_in_capture()
        try:
            region = self.allocate(size_bytes, host=Host.PINNED if pinned else Host.PAGEABLE)
        except (OSError, OverflowError):
            seen = f"{format_bytes(size_bytes)} asked of the host, which has not as much"
            raise cuda_error(Status.OUT_OF_MEMORY, seen=seen) from None
        self._of_host[region.begin] = region
        if pinned:
            self.emit(Alloc(region.begin, size_bytes, How.PINNED))
        return Ptr(region.begin)

    @driver_call
    def host_free(self, ptr: Ptr) -> None:
        self.refuse_in_capture()
        if ptr in self._registered:
            raise cuda_error(
                Status.INVALID_VALUE,
                seen=f"the memory at {ptr:#x} is registered: unregister it first",
            )
        region = forget(self._of_host, ptr, "no memory of the host")
        self.wait_for_all()
        self.space.remove(region)
        if region.host is Host.PINNED:
            self.emit(Free(ptr, len(region.data), How.PINNED))

    @driver_call
    def host_register(self, ptr: Ptr, *, threads: int = 1) -> None:  # noqa: ARG002
        region = self._of_kind(ptr, Host.PAGEABLE, "no pageable memory of the host")
        self.refuse_in_capture()
        region.host = Host.PINNED
        self._registered.add(region.begin)
        self.emit(Alloc(region.begin, len(region.data), How.PINNED))

    @driver_call
    def host_unregister(self, ptr: Ptr) -> None:
        if ptr not in self._registered:
            raise cuda_error(
                Status.INVALID_VALUE, seen=f"no registered memory of the host begins at {ptr:#x}"
            )
        self.refuse_in_capture()
        self.wait_for_all()
        region = self._of_host[ptr]
        region.host = Host.PAGEABLE
        self._registered.discard(ptr)
        self.emit(Free(ptr, len(region.data), How.PINNED))

    @driver_call
    def host_view(self, ptr: Ptr, size_bytes: int) -> memoryview:
        region = self._of_host.get(ptr)
        if region is None or not 0 <= size_bytes <= len(region.data):
            raise cuda_error(
                Status.INVALID_VALUE,
                seen=f"{size_bytes} bytes at {ptr:#x} were not allocated as memory of the host",
            )
        return region.data[:size_bytes].data

    def close(self) -> None:
        super().close()
        self._of_host.clear()
        self._registered.clear()

    def _of_kind(self, ptr: Ptr, kind: Host, what: str) -> Region:
        """Return the memory that begins at an address. Raises CUDA_ERROR_INVALID_VALUE for another kind."""
        region = self._of_host.get(ptr)
        if region is None or region.host is not kind:
            raise cuda_error(Status.INVALID_VALUE, seen=f"{what} begins at {ptr:#x}")
        return region
