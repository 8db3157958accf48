"""All that the checks of ``doctor`` look at, gathered once: they judge values, and touch no machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from cudakit.core.devices.circumstances import libraries, packages, system
from cudakit.core.devices.circumstances.files import Files
from cudakit.core.devices.circumstances.libraries import Library
from cudakit.core.devices.circumstances.packages import Build, Distribution
from cudakit.core.devices.circumstances.system import DeviceNode, Limits
from cudakit.gpu.api.facts import CudaView, Machine, NvmlView, Telemetry
from cudakit.units import Unavailable

_T = TypeVar("_T")

_UNSEEN = Unavailable("was not looked at")
_NOTHING = Files(None)


class Trial(Protocol):
    """One step of using the GPU for real, as ``--deep`` takes them."""

    @property
    def name(self) -> str: ...
    @property
    def error(self) -> str: ...  # "" where it succeeded
    @property
    def hint(self) -> str: ...
    @property
    def seen(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What can be seen of a machine without using a GPU of it. The defaults are an empty machine."""

    simulated: bool = False  # the GPUs are; the rest of the machine is not looked at
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Files = _NOTHING
    device_nodes: tuple[DeviceNode, ...] = ()
    distributions: tuple[Distribution, ...] | Unavailable = ()
    builds: tuple[Build, ...] | Unavailable = ()
    libraries: tuple[Library, ...] | Unavailable = ()
    processes: frozenset[str] | Unavailable = _UNSEEN  # names
    kernel_log: tuple[str, ...] | Unavailable = _UNSEEN
    shared_memory_bytes: int | Unavailable = _UNSEEN
    limits: Limits | Unavailable = _UNSEEN
    privileged: bool = False
    nvml: NvmlView | Unavailable = _UNSEEN
    cuda: CudaView | Unavailable = _UNSEEN
    telemetry: tuple[Telemetry | Unavailable, ...] = ()  # in the order of nvml.devices
    trials: tuple[Trial, ...] | Unavailable = ()


def gather(
    machine: Machine,
    *,
    environment: Mapping[str, str],
    search_path: Iterable[str],
    files: Files,
    trials: tuple[Trial, ...] | Unavailable = (),
) -> Circumstances:
    """Look at a machine; what fails becomes Unavailable with the reason, and nothing else suffers.

    ``search_path`` is where Python packages are looked for, such as sys.path. Where the GPUs are
    simulated, the rest of the machine would contradict them: then pass Files(None).
    """
    nvml = _tried(machine.nvml)
    distributions = _tried(lambda: tuple(packages.installed(search_path)))
    known = () if isinstance(distributions, Unavailable) else distributions
    return Circumstances(
        simulated=machine.simulated,
        environment=environment,
        files=files,
        device_nodes=tuple(system.device_nodes(files)),
        distributions=distributions,
        builds=_tried(lambda: tuple(packages.builds(known))),
        libraries=_tried(lambda: tuple(libraries.libraries(files, environment, known))),
        processes=_tried(lambda: system.process_names(files)),
        kernel_log=_tried(lambda: system.kernel_log(files)),
        shared_memory_bytes=_tried(lambda: system.shared_memory_bytes(files)),
        limits=_tried(system.limits),
        privileged=system.is_privileged(files),
        nvml=nvml,
        cuda=_tried(machine.cuda),
        telemetry=_telemetry(machine, nvml),
        trials=trials,
    )


def _telemetry(
    machine: Machine, nvml: NvmlView | Unavailable
) -> tuple[Telemetry | Unavailable, ...]:
    if isinstance(nvml, Unavailable):
        return ()
    return tuple(_tried(partial(machine.telemetry, device)) for device in nvml.devices)


def _tried(look: Callable[[], _T]) -> _T | Unavailable:
    try:
        return look()
    except Exception as error:  # noqa: BLE001 a look that fails is itself worth reporting
        return Unavailable(f"looking failed: {type(error).__name__}: {error}")
