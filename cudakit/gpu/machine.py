"""The machine that this process runs on, or a recorded machine; and recordings of machines as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from time import time_ns
from typing import TypeVar

from cudakit.errors import InputError, UsageError
from cudakit.gpu.api.facts import CudaView, DeviceFacts, Machine, NvmlView, Process, Telemetry
from cudakit.gpu.nvml import Nvml, open_nvml
from cudakit.gpu.probe import Probe, start_probe
from cudakit.serialize import from_plain, to_plain
from cudakit.units import Unavailable

DEFAULT_MODEL = "h200"


def open_machine(choice: str = "auto") -> Machine:
    """Return the real machine for ``auto`` and ``cuda``, a simulated one for ``sim`` or ``sim:MODEL``.

    The real machine starts a child process that queries the driver. Without a driver the views are
    Unavailable, with the reason. Raises UsageError, with the list of models, for an unknown choice or model.
    """
    kind, _, model = choice.partition(":")
    if kind == "sim":
        return RecordedMachine(model_record(model or DEFAULT_MODEL))
    if choice not in ("auto", "cuda"):
        raise unknown_choice(choice)
    return RealMachine(start_probe())


def unknown_choice(choice: str) -> UsageError:
    """Return the error for an unknown value of ``--gpu``."""
    hint = f"use auto, cuda, sim or sim:MODEL; models are {', '.join(models())}"
    return UsageError(f"unknown GPU choice {choice!r}", hint=hint)


def models() -> tuple[str, ...]:
    """Return the names of the simulated machines."""
    file_names = (file.name for file in files("cudakit.gpu").joinpath("models").iterdir())
    return tuple(
        sorted(
            file_name.removesuffix(".json")
            for file_name in file_names
            if file_name.endswith(".json")
        )
    )


def model_record(model: str) -> Record:
    """Return the record of a model. Raises UsageError, with the list of models, for an unknown one."""
    if model not in models():
        raise UsageError(f"no simulated GPU {model!r}", hint=f"models are {', '.join(models())}")
    file = files("cudakit.gpu").joinpath("models", f"{model}.json")
    return loads(file.read_text(encoding="utf-8"), name=f"sim:{model}")


@dataclass
class RealMachine:
    """The machine of this process. NVML is queried here, CUDA in a child process; each is queried once."""

    probe: Probe
    simulated: bool = False
    _nvml: NvmlView | None = None

    @cached_property
    def _nvml_library(self) -> Nvml | Unavailable:
        return open_nvml()

    @cached_property
    def _cuda(self) -> CudaView | Unavailable:
        return self.probe.answer()

    def nvml(self, *, links: bool = False) -> NvmlView | Unavailable:
        nvml_library = self._nvml_library
        if isinstance(nvml_library, Unavailable):
            return nvml_library
        if self._nvml is None:
            self._nvml = nvml_library.view()
        if links and not self._nvml.links:
            self._nvml = replace(self._nvml, links=nvml_library.links(self._nvml))
        return self._nvml

    def cuda(self) -> CudaView | Unavailable:
        return self._cuda

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        nvml_library = self._nvml_library
        return (
            nvml_library
            if isinstance(nvml_library, Unavailable)
            else nvml_library.telemetry(device, names)
        )

    def activity(self, device: DeviceFacts, names: Collection[str] = ()) -> Telemetry | Unavailable:
        nvml_library = self._nvml_library
        return (
            nvml_library
            if isinstance(nvml_library, Unavailable)
            else nvml_library.activity(device, names)
        )

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        nvml_library = self._nvml_library
        return (
            nvml_library
            if isinstance(nvml_library, Unavailable)
            else nvml_library.processes(device)
        )


def record(machine: Machine) -> Record:
    """Return a record of the current state of a machine."""
    nvml_view = machine.nvml(links=True)
    devices = nvml_view.devices if isinstance(nvml_view, NvmlView) else ()
    return Record(
        nvml=nvml_view,
        cuda=machine.cuda(),
        telemetry=tuple(map(machine.telemetry, devices)),
        activity=tuple(map(machine.activity, devices)),
        processes=tuple(map(machine.processes, devices)),
        about={"recorded_ns": str(time_ns())},
    )


# --- recorded machines -----------------------------------------------------------------------------


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Record:
    """The state of a machine at one time. Tuples have one item per device of ``nvml.devices``."""

    nvml: NvmlView | Unavailable
    cuda: CudaView | Unavailable
    telemetry: tuple[Telemetry | Unavailable, ...] = ()
    activity: tuple[Telemetry | Unavailable, ...] = ()
    processes: tuple[tuple[Process, ...] | Unavailable, ...] = ()
    about: Mapping[str, str] = field(
        default_factory=dict
    )  # facts of the recording: its time and source


@dataclass(frozen=True, slots=True)
class RecordedMachine:
    """A Machine that returns the values of a Record."""

    record: Record
    simulated: bool = True

    def nvml(self, *, links: bool = False) -> NvmlView | Unavailable:
        nvml_view = self.record.nvml
        return (
            nvml_view
            if links or isinstance(nvml_view, Unavailable)
            else replace(nvml_view, links=())
        )

    def cuda(self) -> CudaView | Unavailable:
        return self.record.cuda

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        if not self.record.telemetry:
            return Telemetry(0, {})
        return _select_fields(self._recorded_value(device, self.record.telemetry), names)

    def activity(self, device: DeviceFacts, names: Collection[str] = ()) -> Telemetry | Unavailable:
        return _select_fields(self._recorded_value(device, self.record.activity), names)

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        return self._recorded_value(device, self.record.processes)

    def _recorded_value(self, device: DeviceFacts, values: tuple[_T, ...]) -> _T | Unavailable:
        nvml_view = self.record.nvml
        devices = nvml_view.devices if isinstance(nvml_view, NvmlView) else ()
        index = devices.index(device) if device in devices else len(values)
        return values[index] if index < len(values) else Unavailable("not simulated")


def _select_fields(
    telemetry: Telemetry | Unavailable, names: Collection[str]
) -> Telemetry | Unavailable:
    if isinstance(telemetry, Unavailable) or not names:
        return telemetry
    return replace(
        telemetry,
        fields={name: telemetry.fields[name] for name in telemetry.fields if name in names},
    )


def dumps(record: Record) -> str:
    """Return a Record as JSON."""
    plain_record = to_plain(record, inline_reasons=True)
    return json.dumps(plain_record, indent=1, ensure_ascii=False) + "\n"


def loads(text: str, *, name: str = "record") -> Record:
    """Parse the JSON of ``dumps``. Raises InputError, whose message contains ``name``, for other text."""
    try:
        return from_plain(Record, json.loads(text), strict=True)
    except ValueError as error:
        raise InputError(f"{name} is not a recorded machine: {error}") from error
