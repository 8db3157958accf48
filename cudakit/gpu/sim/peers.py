"""Memory of the other devices of a simulated machine, and how they are linked with this one."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cudakit.gpu.api import Ptr
from cudakit.gpu.api.facts import DeviceFacts, NvmlView
from cudakit.gpu.explain import Status, cuda_error
from cudakit.gpu.machine import DEFAULT_MODEL, model_record
from cudakit.gpu.sim.context import driver_call
from cudakit.gpu.sim.host_memory import HostMemory
from cudakit.gpu.sim.memory import check_size, forget, rounded
from cudakit.gpu.sim.space import Region
from cudakit.trace.events import Alloc, Free
from cudakit.units import Unavailable, format_bytes


class Peers(HostMemory):
    """What is allocated on other devices. They do nothing by themselves: only copies from here go there."""

    def __init__(self, model: str = DEFAULT_MODEL, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self._model = model
        self._of_peers: dict[int, Region] = {}
        self._used_of_peers: Counter[int] = Counter()
        self.enabled_peers: set[int] = set()  # whose kernels may use what is allocated here

    @driver_call
    def can_access_peer(self, ordinal: int) -> bool:
        """Say whether kernels here could use the memory of another device of the machine."""
        self._device(ordinal)
        return (self.ordinal, ordinal) in self._view.peer_access

    @driver_call
    def enable_peer(self, ordinal: int) -> None:
        if ordinal == self.ordinal:
            raise cuda_error(Status.INVALID_DEVICE, seen=f"device {ordinal} is no peer of itself")
        self.check_reached_by(ordinal)
        self.enabled_peers.add(ordinal)

    def check_reached_by(self, ordinal: int) -> None:
        """Refuse a device whose kernels cannot use memory of this one."""
        self._device(ordinal)
        if ordinal != self.ordinal and (ordinal, self.ordinal) not in self._view.peer_access:
            raise cuda_error(
                Status.PEER_ACCESS_UNSUPPORTED,
                seen=f"memory of device {self.ordinal} from device {ordinal}",
            )

    @driver_call
    def peer_malloc(self, ordinal: int, size_bytes: int) -> Ptr:
        check_size(size_bytes)
        self.refuse_in_capture()
        self._charge_peer(ordinal, size_bytes)
        region = self.allocate(size_bytes, peer=ordinal)
        self._of_peers[region.begin] = region
        self.emit(Alloc(region.begin, size_bytes), device=ordinal)
        return Ptr(region.begin)

    @driver_call
    def peer_free(self, ordinal: int, ptr: Ptr) -> None:
        self.refuse_in_capture()
        of_peer = {at: one for at, one in self._of_peers.items() if one.peer == ordinal}
        region = forget(of_peer, ptr, f"no allocation of device {ordinal}")
        self.wait_for_all()
        del self._of_peers[ptr]
        self.space.remove(region)
        self._used_of_peers[ordinal] -= rounded(len(region.data))
        self.emit(Free(ptr, len(region.data)), device=ordinal)

    def nvlinks(self, ordinal: int) -> int:
        """Count the NVLinks to another device; 0 where they meet over PCIe, or by way of the host."""
        if (self.ordinal, ordinal) not in self._view.peer_access:
            return 0
        view = model_record(self._model).nvml
        if isinstance(view, Unavailable):
            return 0
        pair = {_index(view, self._device(number)) for number in (self.ordinal, ordinal)}
        counts = [link.nvlinks for link in view.links if {link.first, link.second} == pair]
        return next((count for count in counts if isinstance(count, int)), 0)

    def close(self) -> None:
        super().close()
        self._of_peers.clear()

    def _charge_peer(self, ordinal: int, size_bytes: int) -> None:
        if ordinal == self.ordinal:
            raise cuda_error(Status.INVALID_DEVICE, seen=f"device {ordinal} is no peer of itself")
        known = self._device(ordinal).fields.get("usable_memory_bytes")
        capacity_bytes = known if isinstance(known, int) else 1 << 30
        free_bytes = capacity_bytes - self._used_of_peers[ordinal]
        if rounded(size_bytes) > free_bytes:
            seen = f"{format_bytes(free_bytes)} of {format_bytes(capacity_bytes)} free on device {ordinal}"
            raise cuda_error(Status.OUT_OF_MEMORY, seen=f"{format_bytes(size_bytes)} asked, {seen}")
        self._used_of_peers[ordinal] += rounded(size_bytes)


def _index(view: NvmlView, device: DeviceFacts) -> int:
    return next((one.index for one in view.devices if one.uuid == device.uuid), -1)
