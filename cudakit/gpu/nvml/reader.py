"""Read fields from NVML. If a call fails, only the fields of its result are Unavailable."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from cudakit.gpu.api.facts import Field
from cudakit.units import Unavailable

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
    # Whether to read the value alone, because the driver omits the value from batches.
    read_alone: bool = False


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
        arguments = [self._constant(argument) for argument in call.arguments]
        if call.function not in STRUCTURES:
            return function(self.handle, *arguments)
        name, version = STRUCTURES[call.function]
        structure = getattr(self.lib, name)()
        structure.version = getattr(self.lib, version)
        function(self.handle, *arguments, ctypes.byref(structure))
        return structure

    def _constant(self, argument: str | int) -> Any:
        return getattr(self.lib, argument) if isinstance(argument, str) else argument

    def _read_values(self, field_values: list[FieldValue]) -> None:
        missing_value = Unavailable("this nvidia-ml-py lacks the field id")
        self._results_by_call |= dict.fromkeys(field_values, missing_value)
        available_values = [
            field_value for field_value in field_values if hasattr(self.lib, field_value.identifier)
        ]
        batched_values = [
            field_value for field_value in available_values if not field_value.read_alone
        ]
        for batch in (
            batched_values,
            *([field_value] for field_value in available_values if field_value.read_alone),
        ):
            if batch:
                self._read_batch(batch)

    def _read_batch(self, batch: list[FieldValue]) -> None:
        ids = [
            (getattr(self.lib, field_value.identifier), field_value.scope) for field_value in batch
        ]
        values = self.attempt(lambda: self.lib.nvmlDeviceGetFieldValues(self.handle, ids))
        for index, field_value in enumerate(batch):
            is_unavailable = isinstance(values, Unavailable)
            self._results_by_call[field_value] = (
                values if is_unavailable else self._decode_value(values[index])
            )

    def _decode_value(self, value: Any) -> Any:
        if value.nvmlReturn:
            return self.reason(value.nvmlReturn)
        if value.valueType >= len(_MEMBERS):
            return Unavailable(f"the value has the unknown type {value.valueType}")
        return getattr(value.value, _MEMBERS[value.valueType])
