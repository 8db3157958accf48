"""Present devices as a Document: the report with its tables of devices and processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from cudakit.devices.result import Device, DevicesResult, Pair, field_registry
from cudakit.devices.select import label, short_label
from cudakit.gpu.api.facts import BIT_NAMES, Field, FieldInfo, Process
from cudakit.report.document import (
    Bytes,
    Column,
    Columns,
    Count,
    Document,
    Facts,
    Node,
    Note,
    Rate,
    Seconds,
    Section,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable, capitalized, format_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


# --- Present fields: as values, as a table, as CSV columns, and as the list of all properties ------

_ACTIVITY_NOTE = Note(
    "info", "Measured between two reads: only --watch and --fields show these fields."
)
_SECONDS_PER_UNIT = {"ns": 1e-9, "us": 1e-6}


def field_value(field: Field, field_info: FieldInfo) -> Value:
    """Return a field as a Value. A number becomes text with its unit if no type of Value has this unit."""
    match field:
        case Unavailable():
            return field
        case tuple():
            return Text(", ".join(_with_unit(item, field_info.unit, 1) for item in field) or "none")
        case bool():
            return Text("yes" if field else "no")
        case str():
            return Text(field or "none")
    if field_info.name in BIT_NAMES:
        names, mask = BIT_NAMES[field_info.name], int(field)
        set_bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
        # A bit without a name is shown as its number.
        texts = [names[bit] if bit < len(names) else f"bit {bit}" for bit in set_bits]
        return Text(", ".join(texts) or "none")
    if field_info.unit == "bytes":
        return Bytes(int(field))
    if field_info.unit in _SECONDS_PER_UNIT:
        return Seconds(field * _SECONDS_PER_UNIT[field_info.unit])
    if field_info.unit == "B/s":
        return Rate(field, "B")
    if field_info.unit or isinstance(field, float):
        return Text(_with_unit(field, field_info.unit, 1))
    return Count(field)


def _with_unit(value: object, unit: str, decimals: int) -> str:
    """Return a number with its unit, which follows after a space: ``692 W``, but ``97%``."""
    number = f"{value:.{decimals}f}" if isinstance(value, float) else str(value)
    return f"{number}{unit}" if unit in ("", "%") else f"{number} {unit}"


def number_with_unit(field: Field, unit: str) -> Value:
    """Return a number with its unit for a column, without decimals."""
    return field if isinstance(field, Unavailable) else Text(_with_unit(field, unit, 0))


def nvml_index_text(device: Device) -> Value:
    """Return the NVML index; for a MIG instance ``GPU/instance``, such as ``0/1``."""
    if device.parent is None:
        return as_text(device.nvml_index)
    return Text(f"{device.parent}/{device.nvml_index}")


def as_text(value: object) -> Value:
    """Return a name or a number as text."""
    return value if isinstance(value, Unavailable) else Text(str(value))


def report_title(result: DevicesResult) -> str:
    """Return the title of the report, with the driver version and a label for simulated GPUs."""
    title_parts = ["Simulated GPUs" if result.simulated else "GPUs of this machine"]
    if isinstance(result.driver_version, str):
        title_parts.append(f"driver {result.driver_version}")
    if not isinstance(result.cuda, Unavailable) and isinstance(result.cuda.version, str):
        title_parts.append(f"CUDA {result.cuda.version}")
    return ", ".join(title_parts)


# --- rows and columns ------------------------------------------------------------------------------


def field_table(fields: Sequence[FieldInfo], result: DevicesResult) -> Document:
    """Return fields as a table with a row for each device."""
    columns = tuple(
        Column(field.name, "text" if field.unit in ("", "bool", "hex") else "number")
        for field in fields
    )
    table_rows = tuple(
        tuple(_device_field_value(device, field) for field in fields) for device in result.devices
    )
    table = Table(columns, table_rows, faint_rows=_hidden_rows(result.devices))
    return Document(report_title(result), (table,))


def _hidden_rows(devices: Sequence[Device]) -> frozenset[int]:
    return frozenset(row for row, device in enumerate(devices) if device.hidden)


def _device_field_value(device: Device, field_info: FieldInfo) -> Value:
    if field_info.name == "nvml_index":
        return nvml_index_text(device)
    return field_value(device.field(field_info.name), field_info)


def field_columns(fields: Sequence[FieldInfo], result: DevicesResult) -> Document:
    """Return fields as arrays of raw values; an unavailable value is an empty cell."""
    arrays = {
        field.name: _masked_array([device.field(field.name) for device in result.devices])
        for field in fields
    }
    return Document(report_title(result), (Columns("devices", arrays),))


def field_list(fields: Iterable[FieldInfo]) -> Document:
    """Return the fields by group, each with its meaning, unit and source."""
    rows_by_group: dict[str, list[tuple[str, Value]]] = {}
    for field in fields:
        unit = f", in {field.unit}" if field.unit not in ("", "bool") else ""
        bit_names = BIT_NAMES.get(field.name, ())
        bits = ", ".join(f"{1 << bit} {name}" for bit, name in enumerate(bit_names))
        meaning = f"{field.description}{unit}{f'; bits: {bits}' if bits else ''} ({field.source})"
        rows_by_group.setdefault(field.group, []).append((field.name, Text(meaning)))
    sections = [
        Section(
            capitalized(group),
            (*([_ACTIVITY_NOTE] if group == "activity" else []), Facts(tuple(rows))),
        )
        for group, rows in rows_by_group.items()
    ]
    source_note = Note("info", "The last parentheses contain the source of the value.")
    return Document("Fields of a device", (source_note, *sections))


def _masked_array(values: Sequence[Field]) -> npt.NDArray[np.generic]:
    import numpy as np  # imported here, because it is slow to import and only CSV needs it

    available = [value for value in values if not isinstance(value, Unavailable)]
    if available and all(type(value) is int for value in available):
        integers = [value if type(value) is int else 0 for value in values]
        is_missing = [isinstance(value, Unavailable) for value in values]
        return np.ma.masked_array(np.array(integers, dtype=np.int64), mask=is_missing)
    if available and all(isinstance(value, float) for value in available):
        return np.array([value if isinstance(value, float) else np.nan for value in values])
    return np.array([_cell_value(value) for value in values], dtype=object)


def _cell_value(field: Field) -> str:
    match field:
        case Unavailable():
            return ""
        case tuple():
            return "; ".join(map(str, field))
        case bool():
            return "true" if field else "false"
    return str(field)


# --- all fields of a device ------------------------------------------------------------------------


def machine_facts(result: DevicesResult) -> Section:
    """Return the versions of the driver and its libraries."""
    fact_rows: list[tuple[str, Value]] = [
        ("driver version", as_text(result.driver_version)),
        ("NVML version", as_text(result.nvml_version)),
    ]
    cuda = result.cuda
    if isinstance(cuda, Unavailable):
        fact_rows.append(("CUDA", cuda))
    else:
        fact_rows += [
            ("CUDA version", as_text(cuda.version)),
            ("libcuda", as_text(cuda.library)),
            ("CUDA_VISIBLE_DEVICES", Text(_variable_text(cuda.visible_devices))),
            ("CUDA_DEVICE_ORDER", Text(_variable_text(cuda.device_order))),
        ]
    return Section("Driver", (Facts(tuple(fact_rows)),))


def property_sections(device: Device) -> Section:
    """Return every field of a device. An unavailable field is shown with its reason."""
    rows_by_group: dict[str, list[tuple[str, Value]]] = {}
    for name, field in field_registry().items():
        if field.kind == "identity" or name in device.fields:
            value = _device_field_value(device, field)
            is_threshold = field.kind == "fact" and name.endswith("_margin_c")
            if is_threshold and isinstance(value, Text):
                # Without these words, a threshold reads as the margin that is left.
                value = Text(f"when temperature_margin_c is {value.value}")
            rows_by_group.setdefault(field.group, []).append((name, value))
    groups = rows_by_group.items()
    sections = [Section(capitalized(group), (Facts(tuple(rows)),)) for group, rows in groups]
    return Section(label(device), tuple(sections))


def _variable_text(value: str | None) -> str:
    return "not set" if value is None else value or "empty"


def report(
    result: DevicesResult, *, with_all_fields: bool = False, with_activity: bool = False
) -> Document:
    """Return the report of devices, one row each; with ``with_all_fields`` also all fields of each device.

    Processes and topology are shown if the result contains them; ``with_activity`` selects the columns of
    activity.
    """
    nodes: list[Node] = [overview_table(result.devices, with_activity=with_activity)]
    if result.simulated and not with_activity:
        nodes.append(
            Note(
                "info",
                "CUDA_VISIBLE_DEVICES is simulated too: its value on this machine has no effect",
            )
        )
    nodes += [Note("warn", note) for note in result.notes]
    # Each note of a device, with all devices that have it.
    for note in dict.fromkeys(note for device in result.devices for note in device.notes):
        devices = [device for device in result.devices if note in device.notes]
        names = ", ".join(map(short_label, devices))
        nodes.append(Note("info" if devices[0].hidden else "warn", f"{names}: {note}"))
    if any(device.processes is not None for device in result.devices):
        nodes.append(Section("Processes", tuple(process_nodes(result.devices))))
    if result.pairs is not None:
        nodes.append(Section("Topology", tuple(topology_nodes(result))))
    if with_all_fields:
        nodes += [machine_facts(result), *map(property_sections, result.devices)]
    return Document(report_title(result), tuple(nodes))


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
        captions.append(
            "~ marks the share of time in which at least one kernel ran; it is shown where no SM activity "
            "was measured."
        )
    return Table(
        columns=tuple(column for column, _ in columns),
        rows=tuple(tuple(cell_of(device) for _, cell_of in columns) for device in devices),
        caption=" ".join(captions),
        faint_rows=_hidden_rows(devices),
    )


def _without_prefix(name: str | Unavailable, prefix: str) -> Value:
    return name if isinstance(name, Unavailable) else Text(name.removeprefix(prefix))


def _memory_cell(device: Device) -> Value:
    used_bytes, total_bytes = device.field("memory_used_bytes"), device.total_memory
    if not isinstance(total_bytes, int):
        return total_bytes if isinstance(total_bytes, Unavailable) else Text(str(total_bytes))
    total, unit = format_bytes(total_bytes).split()
    used = "n/a"
    if isinstance(used_bytes, int):
        # In the unit of the total; a value above 0 is never shown as 0.
        amount = used_bytes / total_bytes * float(total)
        used = "<0.1" if 0 < amount < 0.05 else f"{amount:.1f}"
    return Text(f"{used} / {total} {unit}")


def _power_cell(device: Device) -> Value:
    power_draw, power_limit = device.field("power_draw_w"), device.field("power_limit_enforced_w")
    if isinstance(power_draw, Unavailable) and isinstance(power_limit, Unavailable):
        return power_draw
    return Text(f"{_watts_text(power_draw)} / {_watts_text(power_limit)} W")


def _watts_text(watts: Field) -> str:
    return f"{watts:.0f}" if isinstance(watts, int | float) else "n/a"


def _number_cell(name: str, unit: str) -> _CellFunction:
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


_INDEX_COLUMNS: list[tuple[Column, _CellFunction]] = [
    (Column("CUDA", "number"), lambda device: as_text(device.cuda_index)),
    (Column("NVML", "number"), nvml_index_text),
]
# The vendor's name is omitted, so that the table fits 80 columns.
_NAME_COLUMN: tuple[Column, _CellFunction] = (
    Column("name", "text"),
    lambda device: _without_prefix(device.name, "NVIDIA "),
)
_STATE_COLUMNS: list[tuple[Column, _CellFunction]] = [
    # Domain 0 is omitted, as in lspci, because nearly every machine has no other PCI domain.
    (Column("PCI", "text"), lambda device: _without_prefix(device.pci_bus_id, "0000:")),
    _NAME_COLUMN,
    (Column("memory", "number"), _memory_cell),
    (Column("util", "number"), _number_cell("utilization_gpu_percent", "%")),
]
_ACTIVITY_COLUMNS: list[tuple[Column, _CellFunction]] = [
    _NAME_COLUMN,
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
    known = [
        (device, device.processes) for device in devices if isinstance(device.processes, tuple)
    ]
    # An empty table would show that no process uses a device whose processes are unknown.
    if known:
        rows = tuple(_process_row(device, process) for device, found in known for process in found)
        yield Table(_PROCESS_COLUMNS, rows)
    for device in devices:
        if isinstance(device.processes, Unavailable):
            yield Note(
                "info", f"{short_label(device)}: processes not available: {device.processes.reason}"
            )
    # The names of missing values and the PIDs, by reason. The values are dicts instead of sets, because dicts
    # keep the order.
    names_by_reason: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for process in (process for _, found in known for process in found):
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


def _process_row(device: Device, process: Process) -> tuple[Value, ...]:
    used_bytes, runtime_s = process.used_bytes, process.runtime_s
    return (
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


# --- Present links and peer access between GPUs as matrices ----------------------------------------

_PATH_MEANINGS = {
    "PIX": "at most one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "the PCIe host bridge",
    "NODE": "several PCIe host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}
# Fields of a GPU that the matrix of links shows in its last columns.
_LOCALITY_COLUMNS = {"cpu_affinity": Column("CPUs"), "host_numa_id": Column("NUMA", "number")}
_HINT = (
    "possible causes: an IOMMU, PCIe access control (ACS), or a container or virtual machine that "
    "hides the topology; measure the copy before you rely on it"
)


def topology_nodes(result: DevicesResult) -> Iterator[Node]:
    """Yield matrices of links and peer access, and a note for each pair on which NVML and CUDA disagree."""
    gpus = [device for device in result.devices if device.parent is None]
    if len(gpus) < 2 or not result.pairs:
        yield Note("info", "no links: the report has fewer than two GPUs")
        return
    pair_by_gpus = {(gpu_pair.first, gpu_pair.second): gpu_pair for gpu_pair in result.pairs}
    yield _matrix("link", gpus, pair_by_gpus, lambda gpu_pair: as_text(gpu_pair.path))
    yield _matrix("peer access", gpus, pair_by_gpus, _access_text)
    for gpu_pair in result.pairs:
        if gpu_pair.disagreement:
            yield Note("warn", gpu_pair.disagreement, remedies=(_HINT,))


def _matrix(
    title: str,
    gpus: Sequence[Device],
    pair_by_gpus: Mapping[tuple[int, int], Pair],
    pair_value: Callable[[Pair], Value],
) -> Table:
    def cell(row_gpu: Device, column_gpu: Device) -> Value:
        if row_gpu is column_gpu:
            return Text("-")
        first, second = sorted((_nvml_index(row_gpu), _nvml_index(column_gpu)))
        gpu_pair = pair_by_gpus.get((first, second))
        return pair_value(gpu_pair) if gpu_pair else Unavailable("NVML does not report it")

    locality = _LOCALITY_COLUMNS if title == "link" else {}
    table_rows = tuple(
        (
            Text(_gpu_name(row_gpu)),
            *(cell(row_gpu, column_gpu) for column_gpu in gpus),
            *(as_text(row_gpu.field(name)) for name in locality),
        )
        for row_gpu in gpus
    )
    columns = (Column(title), *(Column(_gpu_name(gpu)) for gpu in gpus), *locality.values())
    return Table(columns, table_rows, caption=_legend(pair_by_gpus) if title == "link" else "")


def _nvml_index(device: Device) -> int:
    return device.nvml_index if isinstance(device.nvml_index, int) else -1


def _gpu_name(device: Device) -> str:
    cuda_name = f"cuda:{device.cuda_index}" if isinstance(device.cuda_index, int) else ""
    return " ".join(filter(None, (cuda_name, f"nvml:{device.nvml_index}")))


def _access_text(gpu_pair: Pair) -> Value:
    """Return whether there is peer access: one answer if NVML and CUDA agree, else both answers."""
    states = (gpu_pair.nvml_read, gpu_pair.nvml_write)
    unknown = next((state for state in states if isinstance(state, Unavailable)), None)
    nvml_access = unknown or all(state == "ok" for state in states)
    cuda_access = gpu_pair.cuda_access
    if isinstance(nvml_access, Unavailable) and isinstance(cuda_access, Unavailable):
        return nvml_access
    answers = {
        name: "yes" if has_access else "no"
        for name, has_access in (("NVML", nvml_access), ("CUDA", cuda_access))
        if not isinstance(has_access, Unavailable)
    }
    if len(answers) == 1:
        return Text("".join(f"{answer} ({name})" for name, answer in answers.items()))
    if nvml_access == cuda_access:
        return Text(answers["NVML"] + (" + atomics" if gpu_pair.cuda_atomics is True else ""))
    return Text(", ".join(f"{name} {answer}" for name, answer in answers.items()))


def _legend(pair_by_gpus: Mapping[tuple[int, int], Pair]) -> str:
    paths = {pair.path for pair in pair_by_gpus.values() if isinstance(pair.path, str)}
    return "; ".join(
        f"{path}: {path[2:]} NVLinks"
        if path.startswith("NV")
        else f"{path}: {_PATH_MEANINGS.get(path, 'unknown')}"
        for path in sorted(paths)
    )
