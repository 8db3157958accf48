"""The GPUs on the PCI bus, which is there without any driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cudakit.core.devices.circumstances.files import Files

_NVIDIA = "0x10de"
# VGA and 3D controllers (PCI Code and ID Assignment, class 03).
_DISPLAY = ("0x0300", "0x0302")
_DEVICES = "/sys/bus/pci/devices"


@dataclass(frozen=True, slots=True)
class PciGpu:
    """An NVIDIA GPU on the bus."""

    address: str  # "0000:65:00.0"
    driver: str  # the name of the kernel driver bound to it, "" for none
    is_gone: bool  # its registers read as all ones: it does not answer any more


def pci_gpus(files: Files) -> tuple[PciGpu, ...]:
    """List the NVIDIA GPUs of the bus, by address."""
    return tuple(_found(files))


def _found(files: Files) -> Iterator[PciGpu]:
    for address in files.names(_DEVICES):
        place = f"{_DEVICES}/{address}"
        kind = files.text(f"{place}/class") or ""
        if files.text(f"{place}/vendor") == _NVIDIA and kind.startswith(_DISPLAY):
            bound = files.resolve(f"{place}/driver") if files.exists(f"{place}/driver") else ""
            gone = files.text(f"{place}/revision") == "0xff"
            yield PciGpu(address, bound.rpartition("/")[2], gone)
