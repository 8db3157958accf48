"""Match the devices of CUDA with those of NVML by UUID, or by PCI address if a UUID is unknown.

Indices are not compared, because CUDA and NVML may number the devices differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cudakit.gpu.api.facts import CudaView, DeviceFacts, Field, NvmlView
from cudakit.units import Unavailable

_UNKNOWN_VALUE = Unavailable("not known")


@dataclass(frozen=True, slots=True)
class MatchedDevice:
    """One device, as NVML and CUDA describe it."""

    nvml: DeviceFacts | None  # facts from NVML; None if NVML does not report the device
    cuda: DeviceFacts | None  # facts from CUDA; None if CUDA does not see the device
    is_hidden: bool  # whether CUDA_VISIBLE_DEVICES hides the device

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
        merged_fields: dict[str, Field] = dict(self.cuda.fields) if self.cuda else {}
        for name, field_value in (self.nvml.fields if self.nvml else {}).items():
            if name not in merged_fields or not isinstance(field_value, Unavailable):
                merged_fields[name] = field_value
        return merged_fields

    def _views(self) -> Iterator[DeviceFacts]:
        yield from (view for view in (self.nvml, self.cuda) if view is not None)


def match_devices(
    nvml: NvmlView | Unavailable, cuda: CudaView | Unavailable
) -> tuple[MatchedDevice, ...]:
    """Return NVML's devices in NVML's order, each with its CUDA device, then the devices of CUDA only."""
    nvml_devices = list(nvml.devices) if isinstance(nvml, NvmlView) else []
    cuda_devices = list(_devices_with_hidden_flag(cuda)) if isinstance(cuda, CudaView) else []
    matched_devices = []
    for device in nvml_devices:
        cuda_device_and_hidden = next(
            (
                cuda_device_and_hidden
                for cuda_device_and_hidden in cuda_devices
                if _is_same_device(device, cuda_device_and_hidden[0])
            ),
            None,
        )
        if cuda_device_and_hidden is None and len(nvml_devices) == len(cuda_devices) == 1:
            # A Jetson has no PCI address, and NVML and CUDA may report different UUIDs for it.
            cuda_device_and_hidden = cuda_devices[0]
        if cuda_device_and_hidden:
            cuda_devices.remove(cuda_device_and_hidden)
        matched_devices.append(
            MatchedDevice(
                device,
                cuda_device_and_hidden[0] if cuda_device_and_hidden else None,
                bool(cuda_device_and_hidden and cuda_device_and_hidden[1]),
            )
        )
    return (
        *matched_devices,
        *(MatchedDevice(None, device, is_hidden) for device, is_hidden in cuda_devices),
    )


def _devices_with_hidden_flag(cuda_view: CudaView) -> Iterator[tuple[DeviceFacts, bool]]:
    """Yield each device of CUDA, and whether CUDA_VISIBLE_DEVICES hides it."""
    yield from ((device, False) for device in cuda_view.devices)
    yield from ((device, True) for device in cuda_view.hidden)


def _is_same_device(nvml_device: DeviceFacts, cuda_device: DeviceFacts) -> bool:
    if isinstance(nvml_device.uuid, str) and isinstance(cuda_device.uuid, str):
        return nvml_device.uuid.lower() == cuda_device.uuid.lower()
    # A MIG instance has the PCI address of its GPU, so the address does not identify the instance.
    has_own_address = isinstance(nvml_device.pci_bus_id, str) and nvml_device.parent is None
    return has_own_address and nvml_device.pci_bus_id == cuda_device.pci_bus_id


def _first_available(values: Iterable[str | Unavailable]) -> str | Unavailable:
    """Return the first available value. If all are Unavailable, return the first reason."""
    value_list = list(values)
    strings = [value for value in value_list if isinstance(value, str)]
    return next(iter(strings or value_list), _UNKNOWN_VALUE)
