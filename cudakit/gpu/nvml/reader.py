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
_FIELD_VALUES = "nvmlDeviceGetFieldValues"
# Which member of nvmlValue_t holds the value, by nvmlValueType_t.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


@dataclass(frozen=True, slots=True)
class Question:
    """One call of nvidia-ml-py; arguments that are text are names of its constants."""

    function: str
    arguments: tuple[str | int, ...] = ()
    structure: str = ""  # of a call that fills one: its class,
    version: str = ""  # and the constant that its member ``version`` must be


@dataclass(frozen=True, slots=True)
class FieldValue:
    """A value that NVML knows by number, many of which are asked for at once."""

    identifier: str
    scope: int = 0
    alone: bool = False  # whether the driver forgets it among others

    @property
    def function(self) -> str:
        return _FIELD_VALUES


Convert: TypeAlias = Callable[[Any], Any]
# A field's name, the question, and what makes the field of the answer.
Readings: TypeAlias = Mapping[str, tuple[Question | FieldValue, Convert]]


@dataclass(slots=True)
class Reader:
    """Asks about one device, each question once; a new Reader asks anew."""

    lib: Any  # nvidia-ml-py's module, or what has its functions
    handle: Any
    reasons: Mapping[int, str] = field(default_factory=dict)  # what a code means here in particular
    lost: bool = False  # whether an answer was that the GPU is lost
    _answers: dict[Question | FieldValue, Any] = field(default_factory=dict)

    def read(self, readings: Readings, names: Collection[str] = ()) -> dict[str, Field]:
        """Return a field for each reading, or for ``names`` of them: its value, or why there is none."""
        wanted = {name: pair for name, pair in readings.items() if not names or name in names}
        self._ask_for_values([q for q, _ in wanted.values() if isinstance(q, FieldValue)])
        return {name: self._field(*pair) for name, pair in wanted.items()}

    def ask(self, question: Question) -> Any:
        """Return NVML's own answer, or Unavailable."""
        if question not in self._answers:
            self._answers[question] = self.attempt(lambda: self._call(question))
        return self._answers[question]

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Return what a call returns; NVML's errors, and functions that are not there, as Unavailable."""
        try:
            return call()
        except self.lib.NVMLError as error:
            return self.reason(error.value)
        except self.lib.NVMLLibraryMismatchError:
            return self.reason(FUNCTION_NOT_FOUND)
        except (AttributeError, TypeError, ctypes.ArgumentError):
            # It changes names and forms from release to release.
            return Unavailable("this nvidia-ml-py asks in another way")

    def reason(self, code: int) -> Unavailable:
        """Say what an error code means."""
        self.lost = self.lost or code == GPU_IS_LOST
        text = self.reasons.get(code) or _REASONS.get(code)
        return Unavailable(text or f"NVML says {self.lib.NVMLError(code)}")

    def _field(self, question: Question | FieldValue, convert: Convert) -> Field:
        answer = self._answers[question] if isinstance(question, FieldValue) else self.ask(question)
        if isinstance(answer, Unavailable):
            return answer
        try:
            converted: Field = convert(answer)
        except (ValueError, TypeError, IndexError) as error:
            return Unavailable(f"NVML's answer cannot be read: {error}")
        return converted

    def _call(self, question: Question) -> Any:
        function = getattr(self.lib, question.function)
        arguments = [self._constant(argument) for argument in question.arguments]
        if not question.structure:
            return function(self.handle, *arguments)
        structure = getattr(self.lib, question.structure)()
        if question.version:
            structure.version = self._constant(question.version)
        function(self.handle, *arguments, ctypes.byref(structure))
        return structure

    def _constant(self, argument: str | int) -> Any:
        return getattr(self.lib, argument) if isinstance(argument, str) else argument

    def _ask_for_values(self, questions: list[FieldValue]) -> None:
        absent = Unavailable("this nvidia-ml-py does not know the value")
        self._answers |= dict.fromkeys(questions, absent)
        known = [question for question in questions if hasattr(self.lib, question.identifier)]
        for batch in (
            [question for question in known if not question.alone],
            *([question] for question in known if question.alone),
        ):
            if batch:
                self._ask_for_batch(batch)

    def _ask_for_batch(self, questions: list[FieldValue]) -> None:
        ids = [(getattr(self.lib, question.identifier), question.scope) for question in questions]
        values = self.attempt(lambda: getattr(self.lib, _FIELD_VALUES)(self.handle, ids))
        for index, question in enumerate(questions):
            refused = isinstance(values, Unavailable)
            self._answers[question] = values if refused else self._value(values[index])

    def _value(self, value: Any) -> Any:
        if value.nvmlReturn:
            return self.reason(value.nvmlReturn)
        if value.valueType >= len(_MEMBERS):
            return Unavailable(f"a value of the unknown type {value.valueType}")
        return getattr(value.value, _MEMBERS[value.valueType])


# --- tables of fields are made of these ------------------------------------------------------------


# NVML's "not available" of a 64-bit and of a 32-bit value (nvml.h: NVML_VALUE_NOT_AVAILABLE).
_ABSENT = (2**64 - 1, 2**32 - 1)
_NO_VALUE = Unavailable("NVML has no value")


def call(
    function: str, *arguments: str | int, to: Convert | None = None
) -> tuple[Question, Convert]:
    """Read what a function returns."""
    return Question(function, arguments), to or same


def filled(
    function: str, structure: str, *, version: str = "", to: Convert
) -> tuple[Question, Convert]:
    """Read a structure that a function fills."""
    return Question(function, structure=structure, version=version), to


def value(
    identifier: str, *, scope: int = 0, alone: bool = False, to: Convert | None = None
) -> tuple[FieldValue, Convert]:
    """Read a value that NVML knows by number."""
    return FieldValue(f"NVML_FI_DEV_{identifier}", scope, alone), to or same


def same(answer: Any) -> Any:
    """Take the answer as it is, without NVML's number for no answer; bytes are text."""
    if isinstance(answer, bytes):
        return answer.decode(errors="replace")
    return _NO_VALUE if answer in _ABSENT else answer


def member(name: str, to: Convert = same) -> Convert:
    """Take a member of a structure."""

    def take(answer: Any) -> Any:
        found = getattr(answer, name)
        return _NO_VALUE if found in _ABSENT else to(found)

    return take


def item(index: int, to: Convert = same) -> Convert:
    """Take an item of a list."""

    def take(answer: Any) -> Any:
        found = answer[index]
        return _NO_VALUE if found in _ABSENT else to(found)

    return take


def scaled(factor: float) -> Callable[[float], Any]:
    """Multiply: NVML counts milliwatts, millijoules and KiB."""

    def multiply(answer: float) -> Any:
        return _NO_VALUE if answer in _ABSENT else answer * factor

    return multiply


def divided(divisor: int) -> Callable[[float], Any]:
    """Divide, for a result that is exact where the factor would not be: 700000 mW are 700.0 W."""

    def divide(answer: float) -> Any:
        return _NO_VALUE if answer in _ABSENT else answer / divisor

    return divide


def hexadecimal(answer: int) -> str:
    """Write an id as eight digits."""
    return f"{answer:#010x}"


def cpu_ranges(words: Any) -> str:
    """Write a set of CPUs, given as 64-bit words, as ``0-15,32-47``."""
    cpus = {64 * at + bit for at, word in enumerate(words) for bit in range(64) if word >> bit & 1}
    starts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    ends = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    pairs = zip(starts, ends, strict=True)
    return ",".join(f"{start}-{end}" if end > start else str(start) for start, end in pairs)
