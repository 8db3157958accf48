"""Who uses which device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudakit.core.devices.present.values import index, nvml_number
from cudakit.core.devices.result import Device
from cudakit.core.devices.select import short_label
from cudakit.document import Bytes, Column, Node, Note, Table, Text, Value
from cudakit.gpu.api.facts import Process
from cudakit.units import Unavailable

_COLUMNS = (
    Column("CUDA", "number"),
    Column("NVML", "number"),
    Column("pid", "number"),
    Column("kind", "text"),
    Column("user", "text"),
    Column("memory", "number"),
    Column("command", "text"),
)


def processes(devices: Sequence[Device]) -> Iterator[Node]:
    """List processes; a device that cannot say has a note."""
    known = [device for device in devices if isinstance(device.processes, tuple)]
    yield Table(_COLUMNS, tuple(row for device in known for row in _rows(device)))
    for device in devices:
        if isinstance(device.processes, Unavailable):
            yield Note("info", f"{short_label(device)}: {device.processes.reason}")
    foreign = [p for d in known for p in _of(d) if isinstance(p.name, Unavailable)]
    if foreign:
        pids = ", ".join(str(process.pid) for process in foreign)
        yield Note("info", f"pid {pids}: not in this namespace (of the host, or another container)")


def _rows(device: Device) -> Iterator[tuple[Value, ...]]:
    for process in _of(device):
        yield (
            index(device.cuda_index),
            nvml_number(device),
            Text(str(process.pid)),
            Text(process.kind),
            _text(process.user),
            _amount(process.used_bytes),
            _text(process.name),
        )


def _of(device: Device) -> tuple[Process, ...]:
    return device.processes if isinstance(device.processes, tuple) else ()


def _text(value: str | Unavailable) -> Value:
    return value if isinstance(value, Unavailable) else Text(value)


def _amount(value: int | Unavailable) -> Value:
    return value if isinstance(value, Unavailable) else Bytes(value)
