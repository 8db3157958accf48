"""Memory of the peer devices of a simulated machine, and the NVLinks to them."""

from __future__ import annotations

from collections import Counter

from cudakit.gpu.api import Ptr
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.handles import check_size, pop_allocation
from cudakit.gpu.machine import model_record
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.space import DEFAULT_CAPACITY_BYTES, Heap, Region, new_bytes, rounded_size
from cudakit.gpu.sim.streams import SimStreams
from cudakit.trace.events import Alloc, Free
from cudakit.units import Unavailable, format_bytes


class SimPeers:
    """Allocations on peer devices, for copies in the streams of this device."""

    def __init__(self, context: Context, streams: SimStreams, heap: Heap) -> None:
        self.context = context
        self._streams, self._heap = streams, heap
        self._peer_allocations: dict[int, Region] = {}
        self._used_bytes: Counter[int] = Counter()
        self.enabled_peers: set[int] = set()  # peers with access to memory of this device

    @driver_call
    def can_access_peer(self, ordinal: int) -> bool:
        """Return whether kernels of this device can access memory of a peer."""
        self.context.facts_of(ordinal)
        return (self.context.ordinal, ordinal) in self.context.cuda_view.peer_access

    @driver_call
    def enable_peer(self, ordinal: int) -> None:
        if ordinal == self.context.ordinal:
            raise cuda_error(
                Status.INVALID_DEVICE, detail=f"device {ordinal} is not a peer of itself"
            )
        self.check_access_from(ordinal)
        self.enabled_peers.add(ordinal)

    def check_access_from(self, ordinal: int) -> None:
        """Raise CUDA_ERROR_PEER_ACCESS_UNSUPPORTED unless a device can access this one's memory."""
        self.context.facts_of(ordinal)
        if (
            ordinal != self.context.ordinal
            and (ordinal, self.context.ordinal) not in self.context.cuda_view.peer_access
        ):
            raise cuda_error(
                Status.PEER_ACCESS_UNSUPPORTED,
                detail=f"access from device {ordinal} to memory of device {self.context.ordinal}",
            )

    @driver_call
    def peer_malloc(self, ordinal: int, size_bytes: int) -> Ptr:
        check_size(size_bytes)
        self._streams.reject_in_capture()
        self._charge_peer(ordinal, size_bytes)
        region = self._heap.add(new_bytes(size_bytes), peer=ordinal)
        self._peer_allocations[region.begin] = region
        self.context.emit(Alloc(region.begin, size_bytes), device=ordinal)
        return Ptr(region.begin)

    @driver_call
    def peer_free(self, ordinal: int, ptr: Ptr) -> None:
        self._streams.reject_in_capture()
        peer_allocations = {
            address: allocation
            for address, allocation in self._peer_allocations.items()
            if allocation.peer == ordinal
        }
        region = pop_allocation(peer_allocations, ptr, f"no allocation of device {ordinal}")
        self.context.wait_for_all()
        del self._peer_allocations[ptr]
        self._heap.space.remove(region)
        self._used_bytes[ordinal] -= rounded_size(len(region.data))
        self.context.emit(Free(ptr, len(region.data)), device=ordinal)

    def nvlinks(self, ordinal: int) -> int:
        """Return the number of NVLinks to a peer; 0 if the path is PCIe or the host."""
        if (self.context.ordinal, ordinal) not in self.context.cuda_view.peer_access:
            return 0
        nvml_view = model_record(self.context.model).nvml
        if isinstance(nvml_view, Unavailable):
            return 0
        uuids = {
            self.context.facts_of(device_ordinal).uuid
            for device_ordinal in (self.context.ordinal, ordinal)
        }
        device_indices = {device.index for device in nvml_view.devices if device.uuid in uuids}
        link_counts = [
            link.nvlinks for link in nvml_view.links if {link.first, link.second} == device_indices
        ]
        return next((link_count for link_count in link_counts if isinstance(link_count, int)), 0)

    def close(self) -> None:
        """Remove all allocations."""
        self._peer_allocations.clear()

    def _charge_peer(self, ordinal: int, size_bytes: int) -> None:
        if ordinal == self.context.ordinal:
            raise cuda_error(
                Status.INVALID_DEVICE, detail=f"device {ordinal} is not a peer of itself"
            )
        usable_bytes = self.context.facts_of(ordinal).fields.get("usable_memory_bytes")
        capacity_bytes = usable_bytes if isinstance(usable_bytes, int) else DEFAULT_CAPACITY_BYTES
        free_bytes = capacity_bytes - self._used_bytes[ordinal]
        if rounded_size(size_bytes) > free_bytes:
            free_text = f"{format_bytes(free_bytes)} of {format_bytes(capacity_bytes)} free"
            raise cuda_error(
                Status.OUT_OF_MEMORY,
                detail=f"{format_bytes(size_bytes)} requested, {free_text} on device {ordinal}",
            )
        self._used_bytes[ordinal] += rounded_size(size_bytes)
