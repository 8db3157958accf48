"""The machine that this process runs on, or a simulated one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib.resources import files
from time import time_ns

from cudakit.errors import UsageError
from cudakit.gpu.api.facts import CudaView, DeviceFacts, Machine, NvmlView, Process, Telemetry
from cudakit.gpu.nvml import Nvml, open_nvml
from cudakit.gpu.probe import Probe, ask
from cudakit.gpu.record import Record, RecordedMachine, loads
from cudakit.units import Unavailable

DEFAULT_MODEL = "h200"


def open_machine(choice: str = "auto") -> Machine:
    """Return the real machine for ``auto`` and ``cuda``, a simulated one for ``sim`` or ``sim:MODEL``.

    The real driver is asked at once, in the background. Never fails for want of one: the views then
    say what is missing. Raises UsageError for a choice or a model that does not exist.
    """
    kind, _, model = choice.partition(":")
    if kind == "sim":
        return RecordedMachine(model_record(model or DEFAULT_MODEL))
    if choice not in ("auto", "cuda"):
        raise UsageError(f"no such GPU: {choice!r}", hint="write auto, cuda, sim or sim:MODEL")
    return RealMachine(ask())


def models() -> tuple[str, ...]:
    """Name the machines that can be simulated."""
    names = (place.name for place in files("cudakit.gpu").joinpath("models").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def model_record(model: str) -> Record:
    """Read what was recorded of a machine. Raises UsageError for a model that does not exist."""
    if model not in models():
        raise UsageError(
            f"no machine {model!r} can be simulated", hint=f"choose among {', '.join(models())}"
        )
    place = files("cudakit.gpu").joinpath("models", f"{model}.json")
    return loads(place.read_text(encoding="utf-8"), name=f"sim:{model}")


@dataclass(slots=True)
class RealMachine:
    """NVML in this process and CUDA in a child, each asked once, and both at the same time."""

    probe: Probe
    simulated: bool = False
    _library: Nvml | Unavailable | None = None
    _nvml: NvmlView | None = None
    _cuda: CudaView | Unavailable | None = None

    def nvml(self, *, links: bool = False) -> NvmlView | Unavailable:
        library = self._open()
        if isinstance(library, Unavailable):
            return library
        if self._nvml is None:
            self._nvml = library.view()
        if links and not self._nvml.links:
            self._nvml = replace(self._nvml, links=library.links(self._nvml))
        return self._nvml

    def cuda(self) -> CudaView | Unavailable:
        if self._cuda is None:
            self._cuda = self.probe.answer()
        return self._cuda

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        library = self._open()
        return library if isinstance(library, Unavailable) else library.telemetry(device, names)

    def activity(self, device: DeviceFacts, names: Collection[str] = ()) -> Telemetry | Unavailable:
        library = self._open()
        return library if isinstance(library, Unavailable) else library.activity(device, names)

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        library = self._open()
        return library if isinstance(library, Unavailable) else library.processes(device)

    def _open(self) -> Nvml | Unavailable:
        if self._library is None:
            self._library = open_nvml()
        return self._library


def record(machine: Machine) -> Record:
    """Write down all that a machine says now."""
    view = machine.nvml(links=True)
    devices = view.devices if isinstance(view, NvmlView) else ()
    return Record(
        nvml=view,
        cuda=machine.cuda(),
        telemetry=tuple(map(machine.telemetry, devices)),
        activity=tuple(map(machine.activity, devices)),
        processes=tuple(map(machine.processes, devices)),
        about={"recorded_ns": str(time_ns())},
    )
