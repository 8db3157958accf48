"""Ask NVML for fields: one call may answer several, and a failing one costs no other."""

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
    INVALID_ARGUMENT: "this driver does not know the question",
    NOT_SUPPORTED: "not supported by this device",
    NO_PERMISSION: "no permission",
    6: "not found",
    FUNCTION_NOT_FOUND: "this driver's NVML has no such function",
    GPU_IS_LOST: "the GPU is lost: it fell off the bus",
    16: "the GPU must be reset first",
    17: "the operating system refuses it",
    21: "no data",
    25: "this driver's NVML has another version of the function",
    27: "not ready",
    UNKNOWN: "NVML says Unknown Error",
}
# Which member of nvmlValue_t holds the value, by nvmlValueType_t.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

# Functions that fill a structure: its class, and the constant for its member ``version``.
STRUCTURES = {
    "nvmlDeviceGetGpuFabricInfoV": ("c_nvmlGpuFabricInfoV_t", "nvmlGpuFabricInfo_v2"),
    "nvmlDeviceGetSramEccErrorStatus": (
        "c_nvmlEccSramErrorStatus_v1_t",
        "nvmlEccSramErrorStatus_v1",
    ),
}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of nvidia-ml-py; text arguments are names of its constants."""

    function: str
    arguments: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldValue:
    """A value that NVML identifies by number; values are read in batches."""

    identifier: str
    scope: int = 0
    alone: bool = False  # whether the driver omits it from a batch


Convert: TypeAlias = Callable[[Any], Any]
# A field's name, the call, and the conversion of its result.
Readings: TypeAlias = Mapping[str, tuple[Call | FieldValue, Convert]]


@dataclass(slots=True)
class Reader:
    """Calls NVML for one device, each call once; a new Reader repeats them."""

    lib: Any  # nvidia-ml-py's module, or a replacement with its functions
    handle: Any
    reasons: Mapping[int, str] = field(default_factory=dict)  # codes with another meaning here
    lost: bool = False  # whether a call returned that the GPU is lost
    _answers: dict[Call | FieldValue, Any] = field(default_factory=dict)

    def read(self, readings: Readings, names: Collection[str] = ()) -> dict[str, Field]:
        """Return the fields of a table, or ``names`` of them; a missing value as Unavailable."""
        wanted = {name: pair for name, pair in readings.items() if not names or name in names}
        self._read_values(
            [source for source, _ in wanted.values() if isinstance(source, FieldValue)]
        )
        return {name: self._field(*pair) for name, pair in wanted.items()}

    def result(self, call: Call) -> Any:
        """Return the raw result of a call, or Unavailable."""
        if call not in self._answers:
            self._answers[call] = self.attempt(lambda: self._call(call))
        return self._answers[call]

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Return the result of a function; NVML's errors and missing functions as Unavailable."""
        try:
            return call()
        except self.lib.NVMLError as error:
            return self.reason(error.value)
        except self.lib.NVMLLibraryMismatchError:
            return self.reason(FUNCTION_NOT_FOUND)
        except (AttributeError, TypeError, ctypes.ArgumentError):
            # nvidia-ml-py changes names and signatures between releases.
            return Unavailable("this nvidia-ml-py asks in another way")

    def reason(self, code: int) -> Unavailable:
        """Return the meaning of an error code."""
        self.lost = self.lost or code == GPU_IS_LOST
        text = self.reasons.get(code) or _REASONS.get(code)
        return Unavailable(text or f"NVML says {self.lib.NVMLError(code)}")

    def _field(self, call: Call | FieldValue, convert: Convert) -> Field:
        answer = self._answers[call] if isinstance(call, FieldValue) else self.result(call)
        if isinstance(answer, Unavailable):
            return answer
        try:
            converted: Field = convert(answer)
        except (ValueError, TypeError, IndexError) as error:
            return Unavailable(f"NVML's answer cannot be read: {error}")
        return converted

    def _call(self, call: Call) -> Any:
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

    def _read_values(self, wanted: list[FieldValue]) -> None:
        absent = Unavailable("this nvidia-ml-py does not know the value")
        self._answers |= dict.fromkeys(wanted, absent)
        known = [one for one in wanted if hasattr(self.lib, one.identifier)]
        together = [one for one in known if not one.alone]
        for batch in (together, *([one] for one in known if one.alone)):
            if batch:
                self._read_batch(batch)

    def _read_batch(self, batch: list[FieldValue]) -> None:
        ids = [(getattr(self.lib, one.identifier), one.scope) for one in batch]
        values = self.attempt(lambda: self.lib.nvmlDeviceGetFieldValues(self.handle, ids))
        for index, one in enumerate(batch):
            refused = isinstance(values, Unavailable)
            self._answers[one] = values if refused else self._value(values[index])

    def _value(self, value: Any) -> Any:
        if value.nvmlReturn:
            return self.reason(value.nvmlReturn)
        if value.valueType >= len(_MEMBERS):
            return Unavailable(f"a value of the unknown type {value.valueType}")
        return getattr(value.value, _MEMBERS[value.valueType])
