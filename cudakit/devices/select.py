"""Select devices: by ``--device``, and by free memory for ``--select``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cudakit.devices.result import Device, DevicesResult, SelectResult
from cudakit.errors import EnvironmentUnusable, UsageError
from cudakit.units import Unavailable, format_bytes

_SELECTOR_HINT = "use 0 or cuda:0, nvml:0, a UUID prefix or a PCI address"
# Minimum length of a UUID prefix, with or without "GPU-". A number with fewer digits is a CUDA index.
_MIN_UUID_LENGTH = 4


@dataclass(frozen=True, slots=True)
class View:
    """The devices and fields to show."""

    ids: tuple[str, ...]
    names: tuple[str, ...]  # names of fields; empty for the full report
    long: bool
    processes: bool
    topology: bool


def filter_devices(result: DevicesResult, selectors: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices that match the selectors, in the order of the result, or all without selectors.

    A selector is 0 or cuda:0, nvml:0, a UUID prefix or a PCI address. Raises UsageError, which lists the
    devices, if a selector matches none or several.
    """
    if not selectors:
        return result.devices
    selected_ids = set()
    for selector in selectors:
        matches = [device for device in result.devices if _matches_selector(device, selector)]
        labels = ", ".join(map(label, matches or result.devices))
        if not matches:
            hint = f"{_SELECTOR_HINT}; devices: {labels}"
            raise UsageError(f"no device matches {selector!r}", hint=hint)
        if len(matches) > 1:
            hint = f"write more of the UUID; they are: {labels}"
            raise UsageError(f"{len(matches)} devices match {selector!r}", hint=hint)
        selected_ids.add(id(matches[0]))
    return tuple(device for device in result.devices if id(device) in selected_ids)


def _matches_selector(device: Device, selector: str) -> bool:
    if selector.isdecimal() and len(selector) < _MIN_UUID_LENGTH:
        return device.cuda_index == int(selector)
    selector = selector.lower()
    index_kind, _, index_text = selector.partition(":")
    if index_kind in ("cuda", "nvml") and index_text.isdecimal():
        device_index = device.cuda_index if index_kind == "cuda" else device.nvml_index
        return device_index == int(index_text) and (index_kind == "cuda" or device.parent is None)
    if isinstance(device.uuid, str) and len(selector) >= _MIN_UUID_LENGTH:
        uuid = device.uuid.lower()
        if uuid.startswith(selector) or uuid.partition("-")[2].startswith(selector):
            return True
    if isinstance(device.pci_bus_id, Unavailable) or device.parent is not None:
        return False
    domain, _, bus_address = device.pci_bus_id.partition(":")
    # nvidia-smi writes eight digits of the domain; lspci omits a domain of 0.
    spellings = {device.pci_bus_id, f"{domain:0>8}:{bus_address}"}
    if int(domain, 16) == 0:
        spellings.add(bus_address)
    return selector in spellings or f"{selector}.0" in spellings


def label(device: Device) -> str:
    """Return all names of a device: ``cuda:0 = nvml:1 = GPU-8c2e... (NVIDIA H200)``."""
    device_names = []
    if isinstance(device.cuda_index, int):
        device_names.append(f"cuda:{device.cuda_index}")
    if isinstance(device.nvml_index, int) and device.parent is None:
        device_names.append(f"nvml:{device.nvml_index}")
    if isinstance(device.uuid, str):
        device_names.append(device.uuid)
    product_name = "" if isinstance(device.name, Unavailable) else f" ({device.name})"
    return " = ".join(device_names) + product_name


def short_label(device: Device) -> str:
    """Return one name of a device, if possible its CUDA index: ``cuda:0``."""
    if isinstance(device.cuda_index, int):
        return f"cuda:{device.cuda_index}"
    if isinstance(device.nvml_index, int):
        instance_prefix = "" if device.parent is None else f"{device.parent}/"
        return f"nvml:{instance_prefix}{device.nvml_index}"
    return label(device)


@dataclass(frozen=True, slots=True)
class SelectSpec:
    """The number of devices to select, and the limits that each must meet."""

    device_count: int = 1
    min_free_bytes: int | None = None
    max_utilization_percent: float | None = None


def select(result: DevicesResult, devices: Sequence[Device], spec: SelectSpec) -> SelectResult:
    """Return the devices with the most free memory among the visible ones that meet the limits.

    Raises EnvironmentUnusable, with the reason for each excluded device, if too few remain.
    """
    reasons = [next(_exclusions(device, spec), "") for device in devices]
    free_devices = [device for device, reason in zip(devices, reasons, strict=True) if not reason]
    best_devices = sorted(free_devices, key=_free_bytes, reverse=True)[: spec.device_count]
    if len(best_devices) < spec.device_count:
        reasons_text = "; ".join(
            f"{label(device)}: {reason}"
            for device, reason in zip(devices, reasons, strict=True)
            if reason
        )
        raise EnvironmentUnusable(
            f"{_request_text(spec)}, but {_matching_count_text(len(free_devices), len(devices))}",
            hint=reasons_text or f"use --count {len(devices)}",
        )
    if spec.device_count > 1 and any(device.parent is not None for device in best_devices):
        raise EnvironmentUnusable(
            f"{_request_text(spec)}, but a CUDA process can use only one MIG instance",
            hint="use --count 1",
        )
    uuids = [str(device.uuid) for device in best_devices]
    return SelectResult(result.simulated, ",".join(uuids), tuple(best_devices))


def _matching_count_text(matching_count: int, total_count: int) -> str:
    is_single = total_count == 1
    if not matching_count:
        return "the only device cannot be selected" if is_single else "no device can be selected"
    if matching_count == total_count:
        return f"there {'is only 1 device' if is_single else f'are only {total_count} devices'}"
    return f"only {matching_count} of {total_count} devices can be selected"


def _request_text(spec: SelectSpec) -> str:
    limit_texts = []
    if spec.min_free_bytes is not None:
        limit_texts.append(f"at least {format_bytes(spec.min_free_bytes)} free memory")
    if spec.max_utilization_percent is not None:
        limit_texts.append(f"at most {spec.max_utilization_percent:g}% utilization")
    devices_text = f"{spec.device_count} device{'s' if spec.device_count > 1 else ''}"
    return (
        f"{devices_text} with {' and '.join(limit_texts)} requested"
        if limit_texts
        else f"{devices_text} requested"
    )


def _exclusions(device: Device, spec: SelectSpec) -> Iterator[str]:
    if isinstance(device.uuid, Unavailable):
        yield device.uuid.reason
    if isinstance(device.cuda_index, Unavailable):
        yield device.cuda_index.reason
    if device.fields.get("compute_mode") == "prohibited":
        yield "compute mode is prohibited"
    free_bytes = device.field("memory_free_bytes")
    if spec.min_free_bytes is not None:
        if isinstance(free_bytes, Unavailable):
            yield f"free memory is unknown: {free_bytes.reason}"
        elif _free_bytes(device) < spec.min_free_bytes:
            yield f"{format_bytes(_free_bytes(device))} free"
    utilization = device.field("utilization_gpu_percent")
    if spec.max_utilization_percent is not None:
        if isinstance(utilization, Unavailable):
            yield f"utilization is unknown: {utilization.reason}"
        elif isinstance(utilization, int) and utilization > spec.max_utilization_percent:
            yield f"{utilization}% utilization"


def _free_bytes(device: Device) -> int:
    free_bytes = device.field("memory_free_bytes")
    return free_bytes if isinstance(free_bytes, int) else -1
