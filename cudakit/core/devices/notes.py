"""What is worth knowing of a machine and of each device, in a few words."""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.core.devices.match import Found
from cudakit.core.devices.visible import VARIABLE, visibility
from cudakit.gpu.api.facts import CudaView, Field, NvmlView
from cudakit.units import Unavailable

# Reasons for lower clocks that are nobody's trouble.
_NORMAL = ("idle", "application clocks setting", "display clock setting")


def machine_notes(nvml: NvmlView | Unavailable, cuda: CudaView | Unavailable) -> tuple[str, ...]:
    """Say what is missing, and what CUDA_VISIBLE_DEVICES does that it does not seem to."""
    return tuple(_machine_notes(nvml, cuda))


def _machine_notes(nvml: NvmlView | Unavailable, cuda: CudaView | Unavailable) -> Iterator[str]:
    if isinstance(nvml, Unavailable):
        yield f"CUDA only, without clocks, power and use: {nvml.reason}"
    if isinstance(cuda, Unavailable):
        yield f"NVML only, without CUDA's numbers and limits: {cuda.reason}"
        return
    if cuda.error:
        _, name, explanation = cuda.error
        yield f"CUDA does not start: {name}: {explanation}"
    if cuda.visible_devices is not None:
        yield from visibility(cuda.visible_devices, cuda.order).notes


def device_notes(
    found: Found, fields: dict[str, Field], *, lost: str | None, visible_devices: str | None
) -> tuple[str, ...]:
    """Say what is unusual about a device; ``lost`` is why NVML can no longer reach it."""
    return tuple(_device_notes(found, fields, lost, visible_devices))


def _device_notes(
    found: Found, fields: dict[str, Field], lost: str | None, visible_devices: str | None
) -> Iterator[str]:
    if found.hidden:
        yield hidden_by(visible_devices)
    if lost:
        yield lost
    if fields.get("integrated") is True:
        yield "integrated: it shares the memory of the host"
    if fields.get("mig_mode") is True and found.nvml and found.nvml.parent is None:
        yield "divided by MIG: CUDA sees its instances"
    mode = fields.get("compute_mode", "default")
    if isinstance(mode, str) and mode != "default":
        yield f"compute mode: {mode}"
    slowed = _slowed(fields.get("clock_event_reasons"))
    if slowed:
        yield f"slowed: {', '.join(slowed)}"
    yield from _errors(fields)


def hidden_by(visible_devices: str | None) -> str:
    """Say that the variable hides a device."""
    return (
        f"hidden by {VARIABLE}={visible_devices}"
        if visible_devices
        else f"hidden: {VARIABLE} is empty"
    )


def _slowed(reasons: object) -> list[str]:
    known = reasons if isinstance(reasons, tuple) else ()
    return [reason for reason in known if reason not in _NORMAL]


def _errors(fields: dict[str, Field]) -> Iterator[str]:
    count = sum(
        value
        for name in ("ecc_sram_uncorrected_volatile", "ecc_dram_uncorrected_volatile")
        if isinstance(value := fields.get(name), int)
    )
    if count:
        yield f"{count} uncorrectable ECC errors"
    if fields.get("remapped_rows_pending") is True:
        yield "reset it to replace memory rows"
    if fields.get("remapped_rows_failed") is True:
        yield "memory rows cannot be replaced"
    action = fields.get("recovery_action", "none")
    if isinstance(action, str) and action != "none":
        yield f"the driver asks: {action}"
