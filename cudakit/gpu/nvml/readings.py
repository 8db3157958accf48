"""The NVML call of each device field, and the conversion of its result."""

from __future__ import annotations

import ctypes
import tomllib
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, TypeAlias

from cudakit.gpu.api.facts import INSTANCE_GROUP, Field, Kind, NvmlField, nvml_fields
from cudakit.units import Unavailable

# --- Read fields from NVML. If a call fails, only the fields of its result are Unavailable ---------

# Codes of nvmlReturn_t (nvml.h).
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
UNKNOWN = 999

_REASONS = {
    1: "NVML is not initialized",
    INVALID_ARGUMENT: "this driver does not support the query",
    NOT_SUPPORTED: "not supported by this device",
    NO_PERMISSION: "no permission",
    6: "not found",
    FUNCTION_NOT_FOUND: "this driver's NVML lacks the function",
    GPU_IS_LOST: "the GPU has fallen off the bus",
    16: "the GPU needs a reset",
    17: "the operating system refuses access",
    21: "no data",
    25: "this driver's NVML has another version of the function",
    27: "not ready",
    UNKNOWN: "NVML returns Unknown Error",
}
# The member of nvmlValue_t that contains the value, by nvmlValueType_t.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

# The class and the version constant of the structure that each function fills.
STRUCTURES = {
    "nvmlDeviceGetGpuFabricInfoV": ("c_nvmlGpuFabricInfoV_t", "nvmlGpuFabricInfo_v2"),
    "nvmlDeviceGetSramEccErrorStatus": (
        "c_nvmlEccSramErrorStatus_v1_t",
        "nvmlEccSramErrorStatus_v1",
    ),
}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of nvidia-ml-py; text arguments are names of constants of that module."""

    function: str
    arguments: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldValue:
    """A value that NVML identifies by a field id; values are read in batches."""

    identifier: str
    scope: int = 0


Convert: TypeAlias = Callable[[Any], Any]
# The call and the conversion of its result for each field, by field name.
Readings: TypeAlias = Mapping[str, tuple[Call | FieldValue, Convert]]


@dataclass(slots=True)
class Reader:
    """Calls NVML for one device and caches the results."""

    lib: Any  # the module pynvml, or a replacement with the same functions
    handle: Any  # NVML's handle of the device
    reasons: Mapping[int, str] = field(default_factory=dict)  # texts that replace those in _REASONS
    is_lost: bool = False  # whether a call reported that the GPU has fallen off the bus
    _results_by_call: dict[Call | FieldValue, Any] = field(default_factory=dict)

    def read(self, readings: Readings, names: Collection[str] = ()) -> dict[str, Field]:
        """Return the fields of a table; ``names`` selects some of them. Missing values are Unavailable."""
        selected_readings = {
            name: pair for name, pair in readings.items() if not names or name in names
        }
        self._read_values(
            [source for source, _ in selected_readings.values() if isinstance(source, FieldValue)]
        )
        return {name: self._field(*pair) for name, pair in selected_readings.items()}

    def result(self, call: Call) -> Any:
        """Return the raw result of a call, or Unavailable."""
        if call not in self._results_by_call:
            self._results_by_call[call] = self.attempt(lambda: self._run_call(call))
        return self._results_by_call[call]

    def call(self, function: str, *arguments: Any) -> Any:
        """Return the result of a function for the device, or Unavailable."""
        return self.attempt(lambda: getattr(self.lib, function)(self.handle, *arguments))

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Return the result of a function; Unavailable if the call fails or the function is missing."""
        try:
            return call()
        except self.lib.NVMLError as error:
            return self.reason(error.value)
        except self.lib.NVMLLibraryMismatchError:
            return self.reason(FUNCTION_NOT_FOUND)
        except (AttributeError, TypeError, ctypes.ArgumentError):
            # Names and signatures differ between releases of nvidia-ml-py.
            return Unavailable("this nvidia-ml-py lacks the function")

    def reason(self, code: int) -> Unavailable:
        """Return the text that explains an error code of NVML."""
        self.is_lost = self.is_lost or code == GPU_IS_LOST
        text = self.reasons.get(code) or _REASONS.get(code)
        return Unavailable(text or f"NVML returns {self.lib.NVMLError(code)}")

    def _field(self, call: Call | FieldValue, convert: Convert) -> Field:
        result = self._results_by_call[call] if isinstance(call, FieldValue) else self.result(call)
        if isinstance(result, Unavailable):
            return result
        try:
            converted_value: Field = convert(result)
        except (ValueError, TypeError, IndexError) as error:
            return Unavailable(f"the result of NVML cannot be converted: {error}")
        return converted_value

    def _run_call(self, call: Call) -> Any:
        function = getattr(self.lib, call.function)
        arguments = [
            (getattr(self.lib, argument) if isinstance(argument, str) else argument)
            for argument in call.arguments
        ]
        if call.function not in STRUCTURES:
            return function(self.handle, *arguments)
        name, version = STRUCTURES[call.function]
        structure = getattr(self.lib, name)()
        structure.version = getattr(self.lib, version)
        function(self.handle, *arguments, ctypes.byref(structure))
        return structure

    def _read_values(self, field_values: list[FieldValue]) -> None:
        missing_value = Unavailable("this nvidia-ml-py lacks the field id")
        self._results_by_call |= dict.fromkeys(field_values, missing_value)
        available = [value for value in field_values if hasattr(self.lib, value.identifier)]
        # The driver omits temperature margins from a batch of values.
        alone = [value for value in available if value.identifier.endswith("_TLIMIT")]
        batch = [value for value in available if value not in alone]
        for values in filter(None, (batch, *([value] for value in alone))):
            ids = [(getattr(self.lib, value.identifier), value.scope) for value in values]
            results = self.call("nvmlDeviceGetFieldValues", ids)
            for index, value in enumerate(values):
                self._results_by_call[value] = (
                    results if isinstance(results, Unavailable) else self._decode(results[index])
                )

    def _decode(self, value: Any) -> Any:
        if value.nvmlReturn:
            return self.reason(value.nvmlReturn)
        if value.valueType >= len(_MEMBERS):
            return Unavailable(f"the value has the unknown type {value.valueType}")
        return getattr(value.value, _MEMBERS[value.valueType])


# --- Names of the values of NVML's enumerations ------------------------------------------------------


# The names of the values by number, by field; a value that is not listed is "unknown".
NAMES: Mapping[str, Mapping[int, str]] = {
    field: {int(number): name for number, name in names.items()}
    for field, names in tomllib.loads(
        files("cudakit.gpu.nvml").joinpath("names.toml").read_text("utf-8")
    ).items()
}


def name_from(names: Mapping[int, str]) -> Callable[[int], str]:
    """Return a function that converts a number to its name."""
    return lambda number: names.get(int(number), f"unknown ({number})")


# nvmlClocksEventReason*, by bit.
CLOCK_EVENT_REASONS = {
    0x1: "idle",
    0x2: "application clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake slowdown",
    0x100: "display clock setting",
}


def clock_event_reasons(mask: int) -> tuple[str, ...]:
    """Return the name of each bit that is set: the reasons for the current clocks."""
    reasons = [text for bit, text in CLOCK_EVENT_REASONS.items() if mask & bit]
    unknown_bits = mask & ~sum(CLOCK_EVENT_REASONS)
    return (*reasons, f"unknown ({unknown_bits:#x})") if unknown_bits else tuple(reasons)


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


def _divide_by_1000(value: float) -> float:
    # Dividing by 1000 is exact, multiplying by 0.001 is not: 700000 mW are 700.0 W.
    return value / 1000


_CONVERSION_BY_UNIT: Mapping[str, Convert] = {
    "bool": bool,
    "hex": "{:#010x}".format,
    "W": _divide_by_1000,
    "J": _divide_by_1000,
}
_CONVERSION_BY_NAME: Mapping[str, Convert] = {
    **{field: name_from(names) for field, names in NAMES.items()},
    "compute_capability": lambda pair: f"{pair[0]}.{pair[1]}",
    "board_id": hex,
    "cpu_affinity": cpu_ranges,
    "fabric_cluster_uuid": lambda digits: str(
        uuid.UUID(bytes=bytes(byte & 0xFF for byte in digits))
    ),
    "fabric_health_mask": hex,
    "instance_memory_bytes": lambda size: size * _MIB,
    "clocks_memory_supported_mhz": tuple,
    "clock_event_reasons_supported": clock_event_reasons,
    "performance_state": "P{}".format,
    "clock_event_reasons": clock_event_reasons,
    "nvlink_sent_bytes": lambda size: size * _KIB,
    "nvlink_received_bytes": lambda size: size * _KIB,
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
        arguments = (int(text) if text.isdecimal() else text for text in field.arguments)
        return Call(source, tuple(arguments))
    scope = int(field.arguments[0]) if field.arguments else 0
    return FieldValue(source, scope)


def _conversion(field: NvmlField) -> Convert:
    name, result_part = field.info.name, field.result_part
    convert = _CONVERSION_BY_NAME.get(name) or _CONVERSION_BY_UNIT.get(field.info.unit)

    def read_field(result: Any) -> Any:
        # Only the state is valid before the fabric is set up.
        needs_fabric = name.startswith("fabric_") and name != "fabric_state"
        if needs_fabric and result.state != _FABRIC_COMPLETED:
            return Unavailable(f"fabric: {_CONVERSION_BY_NAME['fabric_state'](result.state)}")
        if result_part.startswith("."):
            result = getattr(result, result_part[1:])
        elif result_part:
            result = result[int(result_part.strip("[]"))]
        if result in _NOT_AVAILABLE:
            return Unavailable("NVML reports no value")
        if convert:
            return convert(result)
        return result.decode(errors="replace") if isinstance(result, bytes) else result

    return read_field


FACT_READINGS = _readings("fact")
# The facts that only MIG instances have.
INSTANCE_READINGS = _readings("fact", of_instance=True)
TELEMETRY_READINGS = _readings("telemetry")

# Memory fields for drivers before 510, which lack version 2 of the call and count reserved memory as used.
OLD_MEMORY_READINGS: Readings = {
    name: (Call("nvmlDeviceGetMemoryInfo"), TELEMETRY_READINGS[name][1])
    for name in ("memory_used_bytes", "memory_free_bytes")
}
