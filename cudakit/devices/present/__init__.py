"""Present devices as a Document: the report with its tables of devices and processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

from cudakit.devices.present.fields import (
    as_text,
    machine_facts,
    number_with_unit,
    nvml_index_text,
    property_sections,
    report_title,
)
from cudakit.devices.present.topology import topology_nodes
from cudakit.devices.result import Device, DevicesResult
from cudakit.devices.select import short_label
from cudakit.gpu.api.facts import Field, Process
from cudakit.report.document import (
    Bytes,
    Column,
    Document,
    Node,
    Note,
    Seconds,
    Section,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable, format_bytes


def report(
    result: DevicesResult, *, with_all_fields: bool = False, with_activity: bool = False
) -> Document:
    """Return the report of devices, one row each; with ``with_all_fields`` also all fields of each device.

    Processes and topology are shown if the result contains them; ``with_activity`` selects the columns of
    activity.
    """
    nodes: list[Node] = [
        overview_table(result.devices, with_activity=with_activity),
        *_notes(result, with_activity=with_activity),
    ]
    if any(device.processes is not None for device in result.devices):
        nodes.append(Section("Processes", tuple(process_nodes(result.devices))))
    if result.pairs is not None:
        nodes.append(Section("Topology", tuple(topology_nodes(result))))
    if with_all_fields:
        nodes += [machine_facts(result), *map(property_sections, result.devices)]
    return Document(report_title(result), tuple(nodes))


def _notes(result: DevicesResult, *, with_activity: bool) -> Iterator[Note]:
    """Yield the notes of the machine, then each note of a device with all devices that have it."""
    if result.simulated and not with_activity:
        yield Note(
            "info",
            "CUDA_VISIBLE_DEVICES is simulated too: its value on this machine has no effect",
        )
    yield from (Note("warn", note) for note in result.notes)
    for note_text in dict.fromkeys(note for device in result.devices for note in device.notes):
        devices_with_note = [device for device in result.devices if note_text in device.notes]
        level: Literal["info", "warn"] = "info" if devices_with_note[0].hidden else "warn"
        yield Note(level, f"{', '.join(map(short_label, devices_with_note))}: {note_text}")


_CellFunction: TypeAlias = Callable[[Device], Value]


def overview_table(devices: Sequence[Device], *, with_activity: bool = False) -> Table:
    """Return a table with one row for each device; hidden devices are faint."""
    columns = [
        *_INDEX_COLUMNS,
        *(_ACTIVITY_COLUMNS if with_activity else _STATE_COLUMNS),
        *_POWER_COLUMNS,
        _CLOCK_COLUMN if with_activity else _CAPABILITY_COLUMN,
    ]
    captions = []
    if any(device.parent is not None for device in devices):
        captions.append("NVML 0/1 is MIG instance 1 of GPU 0.")
    if with_activity and any(map(shows_utilization, devices)):
        captions.append(_NO_SM_ACTIVITY)
    return Table(
        columns=tuple(column for column, _ in columns),
        rows=tuple(tuple(cell_of(device) for _, cell_of in columns) for device in devices),
        caption=" ".join(captions),
        faint_rows=frozenset(
            row_index for row_index, device in enumerate(devices) if device.hidden
        ),
    )


def _pci_cell(device: Device) -> Value:
    if isinstance(device.pci_bus_id, Unavailable):
        return device.pci_bus_id
    # Domain 0 is omitted, as in lspci, because nearly every machine has no other PCI domain.
    return Text(device.pci_bus_id.removeprefix("0000:"))


def _name_cell(device: Device) -> Value:
    if isinstance(device.name, Unavailable):
        return device.name
    # The vendor's name is omitted, so that the table fits 80 columns.
    return Text(device.name.removeprefix("NVIDIA "))


def _memory_cell(device: Device) -> Value:
    used_bytes = device.field("memory_used_bytes")
    total_bytes = device.field("memory_total_bytes")
    if isinstance(total_bytes, Unavailable):
        total_bytes = device.field("usable_memory_bytes")
    if not isinstance(total_bytes, int):
        return total_bytes if isinstance(total_bytes, Unavailable) else Text(str(total_bytes))
    total_amount_text, unit = format_bytes(total_bytes).split()
    return Text(
        f"{_in_unit_of(used_bytes, total_bytes, float(total_amount_text))} / {total_amount_text} {unit}"
    )


def _in_unit_of(used_bytes: Field, total_bytes: int, total_amount: float) -> str:
    """Format the used memory in the unit of the total memory. A value above 0 is never shown as 0."""
    if not isinstance(used_bytes, int):
        return "n/a"
    used_amount = used_bytes / total_bytes * total_amount
    return "<0.1" if 0 < used_amount < 0.05 else f"{used_amount:.1f}"


def _power_cell(device: Device) -> Value:
    power_draw, power_limit = device.field("power_draw_w"), device.field("power_limit_enforced_w")
    if isinstance(power_draw, Unavailable) and isinstance(power_limit, Unavailable):
        return power_draw
    return Text(f"{_watts_text(power_draw)} / {_watts_text(power_limit)} W")


def _watts_text(watts: Field) -> str:
    return f"{watts:.0f}" if isinstance(watts, int | float) else "n/a"


def _number_cell(name: str, unit: str) -> _CellFunction:
    """Return a function that formats a field of a device with its unit."""
    return lambda device: number_with_unit(device.field(name), unit)


def _utilization_cell(device: Device) -> Value:
    """Return the SM activity. If the GPU does not measure it, return the utilization after a "~"."""
    if shows_utilization(device):
        return Text(f"~{device.field('utilization_gpu_percent')}%")
    return number_with_unit(device.field("sm_activity_percent"), "%")


def shows_utilization(device: Device) -> bool:
    """Return whether the column SM has the utilization, because only that was measured."""
    lacks_sm_activity = isinstance(device.field("sm_activity_percent"), Unavailable)
    return lacks_sm_activity and not isinstance(
        device.field("utilization_gpu_percent"), Unavailable
    )


_NO_SM_ACTIVITY = (
    "~ marks the share of time in which at least one kernel ran; it is shown where no SM activity was "
    "measured."
)

_INDEX_COLUMNS: list[tuple[Column, _CellFunction]] = [
    (Column("CUDA", "number"), lambda device: as_text(device.cuda_index)),
    (Column("NVML", "number"), nvml_index_text),
]
_STATE_COLUMNS: list[tuple[Column, _CellFunction]] = [
    (Column("PCI", "text"), _pci_cell),
    (Column("name", "text"), _name_cell),
    (Column("memory", "number"), _memory_cell),
    (Column("util", "number"), _number_cell("utilization_gpu_percent", "%")),
]
_ACTIVITY_COLUMNS: list[tuple[Column, _CellFunction]] = [
    (Column("name", "text"), _name_cell),
    (Column("memory", "number"), _memory_cell),
    (Column("SM", "number"), _utilization_cell),
    (Column("occupancy", "number"), _number_cell("sm_occupancy_percent", "%")),
    (Column("tensor", "number"), _number_cell("tensor_activity_percent", "%")),
    (Column("DRAM", "number"), _number_cell("dram_bandwidth_percent", "%")),
]
_POWER_COLUMNS: list[tuple[Column, _CellFunction]] = [
    (Column("temp", "number"), _number_cell("temperature_gpu_c", "°C")),
    (Column("power", "number"), _power_cell),
]
# On a narrow terminal the last column is dropped first.
_CLOCK_COLUMN: tuple[Column, _CellFunction] = (
    Column("clock", "number"),
    _number_cell("clock_sm_mhz", "MHz"),
)
_CAPABILITY_COLUMN: tuple[Column, _CellFunction] = (
    Column("cc", "number"),
    lambda device: as_text(device.field("compute_capability")),
)

# The fields that the tables and notes of --watch need.
WATCHED_FIELDS = (
    "name",
    "compute_capability",
    "memory_total_bytes",
    "usable_memory_bytes",
    "memory_used_bytes",
    "utilization_gpu_percent",
    "temperature_gpu_c",
    "power_draw_w",
    "power_limit_enforced_w",
    "clock_sm_mhz",
    "clock_event_reasons",
    "sm_activity_percent",
    "sm_occupancy_percent",
    "tensor_activity_percent",
    "dram_bandwidth_percent",
)


# --- processes -------------------------------------------------------------------------------------


_PROCESS_COLUMNS = (
    Column("CUDA", "number"),
    Column("NVML", "number"),
    Column("pid", "number"),
    Column("type", "text"),
    Column("user", "text"),
    Column("SM", "number"),
    Column("memory", "number"),
    Column("runtime", "number"),
    Column("command", "text"),
)
# The letters of nvidia-smi for the types of processes.
_PROCESS_TYPE_LETTERS = {"compute": "C", "graphics": "G", "MPS": "M+C"}


def process_nodes(devices: Sequence[Device]) -> Iterator[Node]:
    """Yield a table of processes, and notes with the reason for each missing value."""
    devices_with_processes = [device for device in devices if isinstance(device.processes, tuple)]
    # An empty table would show that no process uses a device whose processes are unknown.
    if devices_with_processes:
        yield Table(
            _PROCESS_COLUMNS,
            tuple(row for device in devices_with_processes for row in _process_rows(device)),
        )
    for device in devices:
        if isinstance(device.processes, Unavailable):
            yield Note(
                "info", f"{short_label(device)}: processes not available: {device.processes.reason}"
            )
    yield from _missing_value_notes(
        [process for device in devices_with_processes for process in _processes(device)]
    )


def _missing_value_notes(processes: Sequence[Process]) -> Iterator[Note]:
    """Yield a note for each reason for missing values, with the names of the values and the PIDs."""
    # The names of missing values and the PIDs, by reason. The values are dicts instead of sets, because dicts
    # keep the order.
    names_by_reason: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for process in processes:
        value_by_name = {
            "command": process.name,
            "SM utilization": process.sm_percent,
            "memory": process.used_bytes,
            "runtime": process.runtime_s,
        }
        for name, value in value_by_name.items():
            if isinstance(value, Unavailable):
                value_names, pids = names_by_reason.setdefault(value.reason, ({}, {}))
                value_names[name] = pids[str(process.pid)] = None
    for reason, (value_names, pids) in names_by_reason.items():
        values_text = " and ".join(value_names)
        yield Note("info", f"{values_text} of pid {', '.join(pids)} not available: {reason}")


def _process_rows(device: Device) -> Iterator[tuple[Value, ...]]:
    for process in _processes(device):
        used_bytes, runtime_s = process.used_bytes, process.runtime_s
        yield (
            as_text(device.cuda_index),
            nvml_index_text(device),
            Text(str(process.pid)),
            Text(_PROCESS_TYPE_LETTERS.get(process.kind, process.kind)),
            as_text(process.user),
            number_with_unit(process.sm_percent, "%"),
            used_bytes if isinstance(used_bytes, Unavailable) else Bytes(used_bytes),
            runtime_s if isinstance(runtime_s, Unavailable) else Seconds(round(runtime_s)),
            as_text(process.name),
        )


def _processes(device: Device) -> tuple[Process, ...]:
    return device.processes if isinstance(device.processes, tuple) else ()
