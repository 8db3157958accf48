"""Select devices: by the selectors of ``--id``, and by free memory for ``--select``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cudakit.core.devices.result import Device, DevicesResult, SelectResult
from cudakit.errors import EnvironmentUnusable, UsageError
from cudakit.units import Unavailable, format_bytes

_FORMS = "write cuda:0, nvml:1, a UUID or the beginning of one, or a PCI address"


def filter_devices(result: DevicesResult, selectors: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices that selectors name, in the order of the result; all without selectors.

    Raises UsageError, which lists the devices, if a selector matches none or several.
    """
    if not selectors:
        return result.devices
    wanted = {id(_one(result.devices, selector)) for selector in selectors}
    return tuple(device for device in result.devices if id(device) in wanted)


def _one(devices: Sequence[Device], selector: str) -> Device:
    found = [device for device in devices if _matches(device, selector)]
    if len(found) == 1:
        return found[0]
    how_many = f"{len(found)} devices" if found else "no device"
    listed = ", ".join(map(label, found or devices))
    raise UsageError(f"{selector!r} means {how_many}", hint=f"{_FORMS}; there are: {listed}")


def _matches(device: Device, selector: str) -> bool:
    kind, _, number = selector.lower().partition(":")
    if kind in ("cuda", "nvml") and number.isdecimal():
        index = device.cuda_index if kind == "cuda" else device.nvml_index
        return index == int(number) and (kind == "cuda" or device.parent is None)
    return _starts_with(device.uuid, selector) or _is_address(device, selector)


def _starts_with(uuid: str | Unavailable, selector: str) -> bool:
    if isinstance(uuid, Unavailable):
        return False
    text, bare = selector.lower(), uuid.lower().partition("-")[2]
    # "GPU-" alone, or a single digit, is too short to be meant as a UUID.
    return (len(text) > len("GPU-") and uuid.lower().startswith(text)) or (
        len(text) >= len("GPU-") and bare.startswith(text)
    )


def _is_address(device: Device, selector: str) -> bool:
    if isinstance(device.pci_bus_id, Unavailable) or device.parent is not None:
        return False
    domain, _, rest = device.pci_bus_id.partition(":")
    given = selector.lower()
    # nvidia-smi writes the domain with eight digits, lspci leaves it out where it is 0.
    forms = {device.pci_bus_id, f"{domain:0>8}:{rest}", *([rest] if not int(domain, 16) else [])}
    return given in forms or f"{given}.0" in forms


def label(device: Device) -> str:
    """Name a device by all its numbers: ``cuda:0 = nvml:1 = GPU-8c2e... (NVIDIA H200)``."""
    parts = []
    if isinstance(device.cuda_index, int):
        parts.append(f"cuda:{device.cuda_index}")
    if isinstance(device.nvml_index, int) and device.parent is None:
        parts.append(f"nvml:{device.nvml_index}")
    if isinstance(device.uuid, str):
        parts.append(device.uuid)
    name = "" if isinstance(device.name, Unavailable) else f" ({device.name})"
    return " = ".join(parts) + name


def short_label(device: Device) -> str:
    """Name a device by one number, preferably that of CUDA: ``cuda:0``."""
    if isinstance(device.cuda_index, int):
        return f"cuda:{device.cuda_index}"
    if isinstance(device.nvml_index, int):
        instance = "" if device.parent is None else f"{device.parent}/"
        return f"nvml:{instance}{device.nvml_index}"
    return label(device)


@dataclass(frozen=True, slots=True)
class SelectSpec:
    """The request of ``--select``."""

    count: int = 1
    min_free_bytes: int | None = None
    max_utilization_percent: float | None = None


def select(result: DevicesResult, devices: Sequence[Device], spec: SelectSpec) -> SelectResult:
    """Return the devices with the most free memory among those that CUDA shows and that match.

    Raises EnvironmentUnusable, saying of each why not, where too few fit.
    """
    refused = {id(device): next(_refusals(device, spec), "") for device in devices}
    fit = [device for device in devices if not refused[id(device)]]
    best = sorted(fit, key=_free, reverse=True)[: spec.count]
    if len(best) < spec.count:
        why = "; ".join(f"{label(d)}: {refused[id(d)]}" for d in devices if refused[id(d)])
        raise EnvironmentUnusable(
            f"{_asked(spec)}: {len(fit)} of {len(devices)} fit", hint=why or "no other is there"
        )
    if spec.count > 1 and any(device.parent is not None for device in best):
        raise EnvironmentUnusable(
            f"{_asked(spec)}, but a CUDA process gets no more than one MIG instance",
            hint="ask for --count 1",
        )
    uuids = [str(device.uuid) for device in best]
    return SelectResult(result.simulated, ",".join(uuids), tuple(best))


def _asked(spec: SelectSpec) -> str:
    words = [f"{spec.count} device{'s' if spec.count > 1 else ''} asked for"]
    if spec.min_free_bytes is not None:
        words.append(f"with at least {format_bytes(spec.min_free_bytes)} free")
    if spec.max_utilization_percent is not None:
        words.append(f"used at most {spec.max_utilization_percent:g} %")
    return " ".join(words)


def _refusals(device: Device, spec: SelectSpec) -> Iterator[str]:
    if isinstance(device.uuid, Unavailable):
        yield device.uuid.reason
    if isinstance(device.cuda_index, Unavailable):
        yield f"not for CUDA: {device.cuda_index.reason}"
    if device.fields.get("compute_mode") == "prohibited":
        yield "its compute mode prohibits CUDA"
    free = device.field("memory_free_bytes")
    if spec.min_free_bytes is not None:
        if isinstance(free, Unavailable):
            yield f"free memory unknown: {free.reason}"
        elif _free(device) < spec.min_free_bytes:
            yield f"{format_bytes(_free(device))} free"
    used = device.field("utilization_gpu_percent")
    if spec.max_utilization_percent is not None:
        if isinstance(used, Unavailable):
            yield f"utilization unknown: {used.reason}"
        elif isinstance(used, int) and used > spec.max_utilization_percent:
            yield f"used {used} %"


def _free(device: Device) -> int:
    free = device.field("memory_free_bytes")
    return free if isinstance(free, int) else -1
