"""Match the devices of CUDA with those of NVML by UUID, or by PCI address if a UUID is unknown.

Indices are not compared, because CUDA and NVML may number the devices differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cudakit.gpu.api.facts import CudaView, DeviceFacts, Field, NvmlView
from cudakit.units import Unavailable

_UNKNOWN = Unavailable("not known")


@dataclass(frozen=True, slots=True)
class MatchedDevice:
    """One device, as NVML and CUDA describe it."""

    nvml: DeviceFacts | None  # facts from NVML; None if NVML does not report the device
    cuda: DeviceFacts | None  # facts from CUDA; None if CUDA does not see the device
    hidden: bool  # whether CUDA_VISIBLE_DEVICES hides the device

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
    """Return NVML's devices in NVML's order, each with its CUDA device, then the devices of CUDA only."""
    nvml_devices = list(nvml.devices) if isinstance(nvml, NvmlView) else []
    cuda_devices = list(_with_hidden(cuda)) if isinstance(cuda, CudaView) else []
    matched = []
    for device in nvml_devices:
        pair = next((pair for pair in cuda_devices if _is_same_device(device, pair[0])), None)
        if pair is None and len(nvml_devices) == len(cuda_devices) == 1:
            # A Jetson has no PCI address, and NVML and CUDA may report different UUIDs for it.
            pair = cuda_devices[0]
        if pair:
            cuda_devices.remove(pair)
        matched.append(MatchedDevice(device, pair[0] if pair else None, bool(pair and pair[1])))
    return (*matched, *(MatchedDevice(None, device, hidden) for device, hidden in cuda_devices))


def _with_hidden(view: CudaView) -> Iterator[tuple[DeviceFacts, bool]]:
    """Yield each device of CUDA, and whether CUDA_VISIBLE_DEVICES hides it."""
    yield from ((device, False) for device in view.devices)
    yield from ((device, True) for device in view.hidden)


def _is_same_device(nvml_device: DeviceFacts, cuda_device: DeviceFacts) -> bool:
    if isinstance(nvml_device.uuid, str) and isinstance(cuda_device.uuid, str):
        return nvml_device.uuid.lower() == cuda_device.uuid.lower()
    # A MIG instance has the PCI address of its GPU, so the address does not identify the instance.
    has_own_address = isinstance(nvml_device.pci_bus_id, str) and nvml_device.parent is None
    return has_own_address and nvml_device.pci_bus_id == cuda_device.pci_bus_id


def _first_available(values: Iterable[str | Unavailable]) -> str | Unavailable:
    """Return the first available value, else the first reason."""
    candidates = list(values)
    strings = [value for value in candidates if isinstance(value, str)]
    return next(iter(strings or candidates), _UNKNOWN)
