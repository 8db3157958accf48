"""What things take in virtual time: round numbers of the right order, and no measurements."""

from __future__ import annotations

from dataclasses import dataclass

from cudakit.gpu.api.facts import DeviceFacts

_NS = 1_000_000_000
# Where the facts do not say.
_MEMORY_BYTES_PER_S = 1_000_000_000_000


@dataclass(frozen=True, slots=True)
class Costs:
    """The table of costs of one device."""

    memory_bytes_per_s: int = _MEMORY_BYTES_PER_S
    link_bytes_per_s: int = 50_000_000_000  # between host and device
    pageable_bytes_per_s: int = 10_000_000_000  # likewise, of memory that the driver has to stage
    nvlink_bytes_per_s: int = 20_000_000_000  # over each NVLink to another device
    call_ns: int = 500  # of any call, at the host
    dispatch_ns: int = 2_000  # from the call until its work can begin
    node_ns: int = 500  # likewise, from one node of a graph to the next
    least_ns: int = 1_000  # of any kernel, copy or fill

    def in_memory_ns(self, size_bytes: int) -> int:
        """Say how long it takes to read or write so much of the device's memory."""
        return self.least_ns + size_bytes * _NS // self.memory_bytes_per_s

    def over_link_ns(self, size_bytes: int) -> int:
        """Say how long it takes to move so much between host and device."""
        return self.least_ns + size_bytes * _NS // self.link_bytes_per_s

    def pageable_ns(self, size_bytes: int) -> int:
        """Say how long it takes to move so much between pageable memory of the host and the device."""
        return self.least_ns + size_bytes * _NS // self.pageable_bytes_per_s

    def to_peer_ns(self, size_bytes: int, nvlinks: int) -> int:
        """Say how long it takes to move so much to another device: over NVLinks, or as to the host."""
        if not nvlinks:
            return self.over_link_ns(size_bytes)
        return self.least_ns + size_bytes * _NS // (nvlinks * self.nvlink_bytes_per_s)


def costs_of(facts: DeviceFacts) -> Costs:
    """Derive the speed of memory from the width of its bus and its clock, at two transfers a tick."""
    width_bits = facts.fields.get("global_memory_bus_width_bits")
    clock_khz = facts.fields.get("memory_clock_rate_khz")
    if isinstance(width_bits, int) and isinstance(clock_khz, int) and width_bits * clock_khz > 0:
        return Costs(memory_bytes_per_s=2 * width_bits // 8 * clock_khz * 1000)
    return Costs()
