"""The context of a run: facts of host, driver, environment, limits, packages and processes.

Plain values. ``cudakit.gpu.run_context`` gathers them, once; checks and results read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cudakit.gpu.api.facts import NOT_ASKED, CudaView, DeviceFacts, NvmlView, Telemetry
from cudakit.units import Unavailable

_NOT_GATHERED = Unavailable("not gathered")

SHARED_MEMORY = "/dev/shm"  # noqa: S108 the mount point of POSIX shared memory; nothing is written there
MPS_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108 the default of CUDA_MPS_PIPE_DIRECTORY


@dataclass(frozen=True, slots=True)
class Host:
    """The operating system and the hardware below it. "" is unknown."""

    cpu: str = ""  # model name
    system: str = ""  # "Linux"
    kernel: str = ""  # release: "6.8.0-60-generic"
    distribution: str = ""  # "Ubuntu 24.04.3 LTS"
    distribution_id: str = ""  # "ubuntu"
    container: str = ""  # its runtime: "docker"; "" outside of a container
    is_wsl: bool = False  # Linux under Windows; the GPU is reached through /dev/dxg
    is_jetson: bool = False  # a Tegra system, whose GPU is no PCI device
    secure_boot: bool = False  # kernel modules must be signed
    overcommit_memory: str = ""  # vm.overcommit_memory
    infiniband: tuple[str, ...] = ()  # names of adapters
    available_bytes: int | Unavailable = NOT_ASKED  # memory available without swapping
    shared_memory_bytes: int | Unavailable = _NOT_GATHERED  # size of SHARED_MEMORY

    def summary(self) -> dict[str, str]:
        """Return what results record of the host, without unknown values."""
        recorded = {"cpu": self.cpu, "system": self.system, "kernel": self.kernel}
        return {name: value for name, value in recorded.items() if value}


@dataclass(frozen=True, slots=True)
class KernelModule:
    """The loaded kernel module of the driver."""

    version: str  # "580.65.06"
    is_open: bool  # NVIDIA's open kernel module


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A file under /dev by which a process reaches the driver."""

    path: str
    mode: str  # as ls -l shows it
    error: str  # errno name of opening it for reading and writing; "" on success


@dataclass(frozen=True, slots=True)
class PciGpu:
    """An NVIDIA GPU on the PCI bus."""

    address: str  # "0000:65:00.0"
    driver: str  # the kernel driver bound to it, "" for none
    is_gone: bool  # its registers read as all ones: the GPU has fallen off the bus


@dataclass(frozen=True, slots=True)
class Driver:
    """What the system shows of the NVIDIA driver in files, without calling it."""

    module: KernelModule | None = None  # None if not loaded, or not shown
    module_installed: bool = False  # nvidia.ko exists for the running kernel
    nouveau_loaded: bool = False
    parameters: Mapping[str, str] | None = None  # of the module; None if not shown
    device_nodes: tuple[DeviceNode, ...] = ()
    pci_gpus: tuple[PciGpu, ...] = ()
    kernel_log: tuple[str, ...] | Unavailable = _NOT_GATHERED
    mps_pipes: bool = False  # the MPS pipe directory has a control pipe
    wsl_libcuda: bool = False  # Windows provides a libcuda


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed Python package, under the normalized form of its name."""

    name: str
    version: str
    place: str  # the directory that holds its modules


@dataclass(frozen=True, slots=True)
class Build:
    """The CUDA version that a framework was built for."""

    framework: str
    version: str
    cuda: tuple[int, int | None] | None  # (13, 0); (13, None); None if built without CUDA


@dataclass(frozen=True, slots=True)
class Library:
    """One copy of a CUDA library, under the name that programs load."""

    soname: str
    path: str
    real: str  # with symbolic links resolved
    source: str  # "LD_LIBRARY_PATH", "package", "system" (the loader's own list) or "toolkit"


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A CUDA toolkit below /usr/local."""

    path: str
    cuda: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Software:
    """Installed packages, libraries and toolkits, and configuration files."""

    distributions: tuple[Distribution, ...] | Unavailable = ()  # in the order of the search path
    builds: tuple[Build, ...] | Unavailable = ()
    libraries: tuple[Library, ...] | Unavailable = ()  # in the order of the dynamic loader
    toolkits: tuple[Toolkit, ...] = ()
    nccl_conf: Mapping[str, str] = field(default_factory=dict)  # variables set by /etc/nccl.conf
    missing_extensions: tuple[str, ...] = ()  # of cudakit's own: "core/allocator/_fast"


@dataclass(frozen=True, slots=True)
class Limits:
    """Soft limits of this process; None is no limit."""

    address_space_bytes: int | None
    locked_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class SelfTestStep:
    """One step of the self-test (``doctor --deep``), on all devices."""

    name: str  # "context", "compile", "kernel" or "copy"
    error: str = ""  # "" on success on all devices
    hint: str = ""
    seen: Mapping[str, str] = field(default_factory=dict)  # by device


@dataclass(frozen=True, slots=True)
class RunContext:
    """All facts around a run. The defaults describe an empty machine."""

    simulated: bool = False  # the GPUs are
    variables: Mapping[str, str] = field(default_factory=dict)  # the process environment
    command: tuple[str, ...] = ()  # the command line
    versions: Mapping[str, str] = field(default_factory=dict)  # driver, CUDA, cudakit, Python
    host: Host = Host()
    driver: Driver = Driver()
    software: Software = Software()
    limits: Limits | Unavailable = _NOT_GATHERED
    privileged: bool = False  # this process has CAP_SYS_ADMIN
    processes: frozenset[str] | Unavailable = _NOT_GATHERED  # names of all running ones
    nvml: NvmlView | Unavailable = _NOT_GATHERED
    cuda: CudaView | Unavailable = _NOT_GATHERED
    telemetry: tuple[Telemetry | Unavailable, ...] = ()  # in the order of nvml.devices
    nvml_device: DeviceFacts | None = None  # the first CUDA device, as NVML describes it
    other_processes: int | Unavailable = NOT_ASKED  # number of processes on that device
    self_test: tuple[SelfTestStep, ...] | Unavailable = ()

    @property
    def cuda_devices(self) -> tuple[DeviceFacts, ...]:
        """The devices that CUDA sees; none if CUDA does not start."""
        return () if isinstance(self.cuda, Unavailable) else self.cuda.devices

    @property
    def nvml_devices(self) -> tuple[DeviceFacts, ...]:
        """The devices that NVML sees; none if it does not answer."""
        return () if isinstance(self.nvml, Unavailable) else self.nvml.devices

    @property
    def cuda_error(self) -> int | None:
        """The error code of cuInit, None if cuInit succeeded or was not called."""
        error = None if isinstance(self.cuda, Unavailable) else self.cuda.error
        return error[0] if error else None
