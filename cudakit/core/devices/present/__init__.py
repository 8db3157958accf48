"""Present the devices as a Document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from cudakit.core.devices.present.fields import machine, properties, title
from cudakit.core.devices.present.overview import overview, processes
from cudakit.core.devices.present.topology import topology
from cudakit.core.devices.result import DevicesResult
from cudakit.core.devices.select import short_label
from cudakit.document import Document, Node, Note, Section


def report(result: DevicesResult, *, long: bool = False, activity: bool = False) -> Document:
    """Lay out the devices of a result as one row each; with ``long``, also all fields of each.

    Processes and topology are shown if the result has them; ``activity`` selects the columns of activity.
    """
    nodes: list[Node] = [overview(result.devices, activity=activity), *_notes(result)]
    if any(device.processes is not None for device in result.devices):
        nodes.append(Section("Processes", tuple(processes(result.devices))))
    if result.pairs is not None:
        nodes.append(Section("Topology", tuple(topology(result))))
    if long:
        nodes += [machine(result), *map(properties, result.devices)]
    return Document(title(result), tuple(nodes))


def _notes(result: DevicesResult) -> Iterator[Note]:
    """Yield the notes of the machine, then those of devices, each with all devices that it applies to."""
    yield from (Note("warn", note) for note in result.notes)
    for text in dict.fromkeys(note for device in result.devices for note in device.notes):
        devices = [device for device in result.devices if text in device.notes]
        level: Literal["info", "warn"] = "info" if devices[0].hidden else "warn"
        yield Note(level, f"{', '.join(map(short_label, devices))}: {text}")
