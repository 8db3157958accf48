"""A machine written down: the views of a real one as JSON, and the Machine that they make again.

The same JSON carries the answer of the child process that asks the driver. Unavailable is
``{"unavailable": reason}``; a missing key takes the default of its dataclass.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from cudakit.errors import InputError
from cudakit.gpu.api.facts import CudaView, DeviceFacts, NvmlView, Process, Telemetry
from cudakit.units import Unavailable

_T = TypeVar("_T")
_SCALARS = (int, float, str, bool)


@dataclass(frozen=True, slots=True)
class Record:
    """What one machine said at one time. Telemetry and the rest have the order of ``nvml.devices``."""

    nvml: NvmlView | Unavailable
    cuda: CudaView | Unavailable
    telemetry: tuple[Telemetry | Unavailable, ...] = ()
    activity: tuple[Telemetry | Unavailable, ...] = ()
    processes: tuple[tuple[Process, ...] | Unavailable, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)  # date, driver and where it came from


@dataclass(frozen=True, slots=True)
class RecordedMachine:
    """The Machine of a Record: always says the same."""

    record: Record
    simulated: bool = True

    def nvml(self, *, links: bool = False) -> NvmlView | Unavailable:
        view = self.record.nvml
        return view if links or isinstance(view, Unavailable) else replace(view, links=())

    def cuda(self) -> CudaView | Unavailable:
        return self.record.cuda

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        if not self.record.telemetry:
            return Telemetry(0, {})
        return _limited(self._of(device, self.record.telemetry), names)

    def activity(self, device: DeviceFacts, names: Collection[str] = ()) -> Telemetry | Unavailable:
        return _limited(self._of(device, self.record.activity), names)

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        return self._of(device, self.record.processes)

    def _of(self, device: DeviceFacts, recorded: tuple[_T, ...]) -> _T | Unavailable:
        view = self.record.nvml
        devices = view.devices if isinstance(view, NvmlView) else ()
        at = devices.index(device) if device in devices else len(recorded)
        return recorded[at] if at < len(recorded) else Unavailable("was not recorded")


def _limited(found: Telemetry | Unavailable, names: Collection[str]) -> Telemetry | Unavailable:
    if isinstance(found, Unavailable) or not names:
        return found
    return replace(
        found, fields={name: found.fields[name] for name in found.fields if name in names}
    )


def dumps(record: Record) -> str:
    """Write a Record as JSON."""
    return json.dumps(plain(record), indent=1, ensure_ascii=False) + "\n"


def loads(text: str, *, name: str = "record") -> Record:
    """Read what ``dumps`` wrote. Raises InputError, which calls it ``name``, for anything else."""
    try:
        record: Record = typed(Record, json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{name} is not a recorded machine: {error}") from error
    return record


def plain(value: object) -> Any:
    """Reduce dataclasses, mappings and tuples to what JSON has."""
    match value:
        case Unavailable():
            return {"unavailable": value.reason}
        case Mapping():
            return {key: plain(item) for key, item in value.items()}
        case tuple() | list():
            return [plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    return value


def typed(hint: Any, value: Any) -> Any:
    """Build from JSON the value of a type: one of the dataclasses here, or a part of one.

    Raises TypeError or ValueError where the value does not have the form of the type.
    """
    if hint is Unavailable:
        return Unavailable(typed(str, value["unavailable"]))
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _one_of(inner, value)
    if origin is tuple:
        return _sequence(inner, value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {str(key): typed(inner[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return _record(hint, value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not (type(None) if hint is None else hint):
        raise TypeError(f"{value!r} is not a {getattr(hint, '__name__', hint)}")
    return value


def _one_of(hints: tuple[Any, ...], value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"unavailable"}:
        return typed(Unavailable, value) if Unavailable in hints else _refuse(hints, value)
    if type(value) in hints:
        return value
    holders = [hint for hint in hints if hint not in (Unavailable, type(None), *_SCALARS)]
    return typed(holders[0], value) if holders else _refuse(hints, value)


def _refuse(hints: tuple[Any, ...], value: Any) -> typing.NoReturn:
    names = ", ".join(getattr(hint, "__name__", str(hint)) for hint in hints)
    raise TypeError(f"{value!r} is none of {names}")


def _sequence(inner: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    if inner[-1] is ...:
        return tuple(typed(inner[0], item) for item in value)
    return tuple(typed(hint, item) for hint, item in zip(inner, value, strict=True))


def _record(hint: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not a {hint.__name__}")
    hints = typing.get_type_hints(hint)
    unknown = value.keys() - hints.keys()
    if unknown:
        raise TypeError(f"{hint.__name__} has no {sorted(unknown)[0]!r}")
    return hint(**{name: typed(hints[name], item) for name, item in value.items()})
