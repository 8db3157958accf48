"""A machine written down: the views of a real one as JSON, and the Machine that they make again."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cudakit.errors import InputError
from cudakit.gpu.api.facts import CudaView, DeviceFacts, NvmlView, Process, Telemetry
from cudakit.serialize import from_plain, to_plain
from cudakit.units import Unavailable

_T = TypeVar("_T")


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
    plain = to_plain(record, inline_reasons=True)
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def loads(text: str, *, name: str = "record") -> Record:
    """Read what ``dumps`` wrote. Raises InputError, which calls it ``name``, for anything else."""
    try:
        return from_plain(Record, json.loads(text), strict=True)
    except ValueError as error:
        raise InputError(f"{name} is not a recorded machine: {error}") from error
