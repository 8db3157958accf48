"""Match the devices of CUDA and NVML by UUID, else by PCI address, never by index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cudakit.gpu.api.facts import CudaView, DeviceFacts, Field, NvmlView
from cudakit.units import Unavailable

_UNKNOWN = Unavailable("not known")


@dataclass(frozen=True, slots=True)
class MatchedDevice:
    """One device, as NVML and CUDA describe it."""

    nvml: DeviceFacts | None
    cuda: DeviceFacts | None
    hidden: bool  # whether CUDA_VISIBLE_DEVICES hides it

    @property
    def uuid(self) -> str | Unavailable:
        return _first_available(view.uuid for view in self._views())

    @property
    def pci_bus_id(self) -> str | Unavailable:
        return _first_available(view.pci_bus_id for view in self._views())

    @property
    def is_instance(self) -> bool:
        """Whether this is a MIG instance, a part of a GPU."""
        return self.nvml is not None and self.nvml.parent is not None

    @property
    def fields(self) -> Mapping[str, Field]:
        """All facts; NVML's override CUDA's, because NVML ignores CUDA_VISIBLE_DEVICES."""
        merged: dict[str, Field] = dict(self.cuda.fields) if self.cuda else {}
        for name, value in (self.nvml.fields if self.nvml else {}).items():
            if name not in merged or not isinstance(value, Unavailable):
                merged[name] = value
        return merged

    def _views(self) -> Iterator[DeviceFacts]:
        yield from (view for view in (self.nvml, self.cuda) if view is not None)


def match(nvml: NvmlView | Unavailable, cuda: CudaView | Unavailable) -> tuple[MatchedDevice, ...]:
    """Return NVML's devices in its order, each with its CUDA device, then those of CUDA only."""
    ours = list(nvml.devices) if isinstance(nvml, NvmlView) else []
    theirs = list(_with_hidden(cuda)) if isinstance(cuda, CudaView) else []
    matched = []
    for device in ours:
        other = next((pair for pair in theirs if _is_same_device(device, pair[0])), None)
        if other is None and len(ours) == len(theirs) == 1:
            # A Jetson has no PCI address, and NVML and CUDA may not agree on its UUID.
            other = theirs[0]
        if other:
            theirs.remove(other)
        matched.append(MatchedDevice(device, other[0] if other else None, bool(other and other[1])))
    return (*matched, *(MatchedDevice(None, device, hidden) for device, hidden in theirs))


def _with_hidden(view: CudaView) -> Iterator[tuple[DeviceFacts, bool]]:
    yield from ((device, False) for device in view.devices)
    yield from ((device, True) for device in view.hidden)


def _is_same_device(device: DeviceFacts, other: DeviceFacts) -> bool:
    if isinstance(device.uuid, str) and isinstance(other.uuid, str):
        return device.uuid.lower() == other.uuid.lower()
    # All MIG instances of a GPU have its address.
    is_addressable = isinstance(device.pci_bus_id, str) and device.parent is None
    return is_addressable and device.pci_bus_id == other.pci_bus_id


def _first_available(values: Iterable[str | Unavailable]) -> str | Unavailable:
    """Return the first available value, else the first reason."""
    candidates = list(values)
    strings = [value for value in candidates if isinstance(value, str)]
    return next(iter(strings or candidates), _UNKNOWN)
