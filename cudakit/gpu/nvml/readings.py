"""The NVML call of each device field, and the conversion of its result."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from cudakit.gpu.api.fields import INSTANCE_GROUP, Kind, NvmlField, nvml_fields
from cudakit.gpu.nvml import names
from cudakit.gpu.nvml.names import name_from
from cudakit.gpu.nvml.reader import Call, Convert, FieldValue, Readings
from cudakit.units import Unavailable

_KIB = 2**10
_MIB = 2**20
_FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
# NVML_VALUE_NOT_AVAILABLE (nvml.h) as a 64-bit and as a 32-bit value.
_NOT_AVAILABLE = (2**64 - 1, 2**32 - 1)


def cpu_ranges(masks: Iterable[int]) -> str:
    """Return a set of CPUs, given as 64-bit masks, as ranges: ``0-15,32-47``."""
    cpus = {
        64 * index + bit for index, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1
    }
    first_cpus = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    last_cpus = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    cpu_pairs = zip(first_cpus, last_cpus, strict=True)
    return ",".join(
        f"{first_cpu}-{last_cpu}" if last_cpu > first_cpu else str(first_cpu)
        for first_cpu, last_cpu in cpu_pairs
    )


def _decode_text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _divide_by_1000(value: float) -> float:
    # Dividing by 1000 is exact, multiplying by 0.001 is not: 700000 mW are 700.0 W.
    return value / 1000


def _cluster_uuid(uuid_bytes: Iterable[int]) -> str:
    return str(uuid.UUID(bytes=bytes(byte & 0xFF for byte in uuid_bytes)))


_CONVERSION_BY_UNIT: Mapping[str, Convert] = {
    "bool": bool,
    "hex": "{:#010x}".format,
    "W": _divide_by_1000,
    "J": _divide_by_1000,
}
_CONVERSION_BY_NAME: Mapping[str, Convert] = {
    "brand": name_from(names.BRANDS),
    "architecture": name_from(names.ARCHITECTURES),
    "compute_capability": lambda pair: f"{pair[0]}.{pair[1]}",
    "board_id": hex,
    "bus": name_from(names.BUSES),
    "cpu_affinity": cpu_ranges,
    "addressing_mode": name_from(names.ADDRESSING_MODES),
    "power_source": name_from(names.POWER_SOURCES),
    "nvlink_version": name_from(names.NVLINK_VERSIONS),
    "fabric_state": name_from(names.FABRIC_STATES),
    "fabric_cluster_uuid": _cluster_uuid,
    "fabric_health_mask": hex,
    "compute_mode": name_from(names.COMPUTE_MODES),
    "virtualization_mode": name_from(names.VIRTUALIZATION_MODES),
    "host_vgpu_mode": name_from(names.HOST_VGPU_MODES),
    "operation_mode": name_from(names.OPERATION_MODES),
    "instance_memory_bytes": lambda size: size * _MIB,
    "clocks_memory_supported_mhz": tuple,
    "clock_event_reasons_supported": names.clock_event_reasons,
    "performance_state": "P{}".format,
    "clock_event_reasons": names.clock_event_reasons,
    "nvlink_sent_bytes": lambda size: size * _KIB,
    "nvlink_received_bytes": lambda size: size * _KIB,
    "recovery_action": name_from(names.RECOVERY_ACTIONS),
}


def _readings(kind: Kind, *, of_instance: bool = False) -> Readings:
    return {
        field.info.name: (_call(field), _conversion(field))
        for field in nvml_fields()
        if field.info.kind == kind and (field.info.group == INSTANCE_GROUP) == of_instance
    }


def _call(field: NvmlField) -> Call | FieldValue:
    source = field.info.source
    if source.startswith("nvml"):
        argument_texts = field.arguments
        return Call(
            source, tuple(int(text) if text.isdecimal() else text for text in argument_texts)
        )
    scope = int(field.arguments[0]) if field.arguments else 0
    # The driver omits temperature margins from a batch of values.
    return FieldValue(source, scope, read_alone=source.endswith("_TLIMIT"))


def _conversion(field: NvmlField) -> Convert:
    name, result_part = field.info.name, field.result_part
    convert = _CONVERSION_BY_NAME.get(name) or _CONVERSION_BY_UNIT.get(
        field.info.unit, _decode_text
    )

    def read_field(result: Any) -> Any:
        # Only the state is valid before the fabric is set up.
        needs_fabric = name.startswith("fabric_") and name != "fabric_state"
        if needs_fabric and result.state != _FABRIC_COMPLETED:
            return Unavailable(f"fabric: {_CONVERSION_BY_NAME['fabric_state'](result.state)}")
        value = _result_part(result, result_part)
        return Unavailable("NVML reports no value") if value in _NOT_AVAILABLE else convert(value)

    return read_field


def _result_part(result: Any, result_part: str) -> Any:
    if result_part.startswith("."):
        return getattr(result, result_part[1:])
    return result[int(result_part.strip("[]"))] if result_part else result


FACT_READINGS = _readings("fact")
# The facts that only MIG instances have.
INSTANCE_READINGS = _readings("fact", of_instance=True)
TELEMETRY_READINGS = _readings("telemetry")

# Memory fields for drivers before 510, which lack version 2 of the call and count reserved memory as used.
OLD_MEMORY_READINGS: Readings = {
    name: (Call("nvmlDeviceGetMemoryInfo"), TELEMETRY_READINGS[name][1])
    for name in ("memory_used_bytes", "memory_free_bytes")
}
