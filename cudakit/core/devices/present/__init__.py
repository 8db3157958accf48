"""The devices as a Document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from cudakit.core.devices.present.overview import overview
from cudakit.core.devices.present.processes import processes
from cudakit.core.devices.present.properties import machine, properties
from cudakit.core.devices.present.topology import topology
from cudakit.core.devices.result import Device, DevicesResult
from cudakit.core.devices.select import short_label
from cudakit.document import Document, Node, Note, Section
from cudakit.units import Unavailable


def report(
    result: DevicesResult,
    devices: Sequence[Device],
    *,
    long: bool = False,
    activity: bool = False,
) -> Document:
    """Lay out ``devices`` of a result in a row each; with ``long``, all that is known of each.

    Processes and the topology are shown where the result has them, ``activity`` where it was asked for.
    """
    nodes: list[Node] = [overview(devices, activity=activity), *_notes(result, devices)]
    if any(device.processes is not None for device in devices):
        nodes.append(Section("Processes", tuple(processes(devices))))
    if result.pairs is not None:
        nodes.append(Section("Topology", tuple(topology(result, devices))))
    if long:
        nodes += [machine(result), *map(properties, devices)]
    return Document(", ".join(_title(result)), tuple(nodes))


def _notes(result: DevicesResult, devices: Sequence[Device]) -> Iterator[Note]:
    """Give the notes of the machine, then those of devices, each with all that it is true of."""
    yield from (Note("warn", note) for note in result.notes)
    for text in dict.fromkeys(note for device in devices for note in device.notes):
        concerned = [device for device in devices if text in device.notes]
        level: Literal["info", "warn"] = "info" if concerned[0].hidden else "warn"
        yield Note(level, f"{', '.join(map(short_label, concerned))}: {text}")


def _title(result: DevicesResult) -> Iterator[str]:
    """Say first of all whether this is real."""
    yield "Simulated GPUs" if result.simulated else "GPUs of this machine"
    if isinstance(result.driver_version, str):
        yield f"driver {result.driver_version}"
    if not isinstance(result.cuda, Unavailable) and isinstance(result.cuda.version, str):
        yield f"CUDA {result.cuda.version}"
