"""Facts, telemetry, processes and links of GPUs, as NVML and the CUDA driver report them.

NVML and CUDA number devices differently; their views are separate here and merged by UUID in
``devices``. A field is a value, or Unavailable with the reason; unknown values are never 0.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, TypeAlias, cast

from cudakit.gpu.driver_errors import remedy_of
from cudakit.units import Unavailable

Scalar: TypeAlias = int | float | str | bool
Field: TypeAlias = Scalar | tuple[Scalar, ...] | Unavailable

_NOT_RECORDED = Unavailable("not simulated")
NOT_QUERIED = Unavailable("not queried")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts of a device from one library. Field names carry their units."""

    # Index of the device in CUDA or NVML; for a MIG instance, the index in its GPU; -1 without an index.
    index: int
    uuid: str | Unavailable  # "GPU-..." or "MIG-..."
    # "0000:65:00.0" in lower case; a MIG instance has the address of its GPU.
    pci_bus_id: str | Unavailable
    fields: Mapping[str, Field]  # other fields by name; see devices/fields
    parent: int | None = None  # NVML index of the GPU of a MIG instance


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Values of a device that change: clocks, power, temperature, utilization, memory in use."""

    time_ns: int  # time of the query in ns since 1970-01-01
    fields: Mapping[str, Field]


@dataclass(frozen=True, slots=True)
class Process:
    """A process that uses a device; ``pid`` may belong to another PID namespace."""

    pid: int  # process id
    kind: str  # "compute", "graphics"
    used_bytes: int | Unavailable  # device memory that the process uses
    name: str | Unavailable  # the command line
    user: str | Unavailable  # name of the user who runs the process
    sm_percent: int | Unavailable = _NOT_RECORDED  # share of time in which the process ran kernels
    runtime_s: float | Unavailable = _NOT_RECORDED  # seconds since the process started


@dataclass(frozen=True, slots=True)
class Link:
    """The connection of two devices according to NVML (``nvidia-smi topo -m``, ``-p2p``)."""

    first: int  # NVML index of one device
    second: int  # NVML index of the other device
    # Topology as nvidia-smi abbreviates it: "NV18", "PIX", "PXB", "PHB", "NODE", "SYS".
    path: str | Unavailable
    nvlinks: int | Unavailable
    p2p_read: str | Unavailable  # "ok", or NVML's reason
    p2p_write: str | Unavailable
    p2p_atomics: str | Unavailable


@dataclass(frozen=True, slots=True)
class CudaView:
    """The devices that the CUDA driver reports, queried in a child process so that this process can fork."""

    driver_version: tuple[int, int] | Unavailable  # newest CUDA version that the driver supports
    devices: tuple[DeviceFacts, ...]  # visible devices in CUDA's order
    # Devices hidden by CUDA_VISIBLE_DEVICES, in CUDA's order without that variable; their index is -1.
    hidden: tuple[DeviceFacts, ...]
    peer_access: tuple[tuple[int, int], ...]  # pairs of ordinals with peer access
    peer_atomics: tuple[tuple[int, int], ...]  # pairs of ordinals with native peer atomics
    error: tuple[int, str, str] | None  # code, name and explanation of a failed cuInit
    libcuda: str | Unavailable  # path of the loaded libcuda
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES at the query
    device_order: str | None  # CUDA_DEVICE_ORDER at the query
    order: tuple[str, ...] = ()  # UUIDs of all devices in CUDA's order without CUDA_VISIBLE_DEVICES


@dataclass(frozen=True, slots=True)
class NvmlView:
    """The devices that NVML reports."""

    driver_version: str | Unavailable
    nvml_version: str | Unavailable
    devices: tuple[DeviceFacts, ...]  # each GPU, followed by its MIG instances
    links: tuple[Link, ...]  # one per pair of GPUs, lower index first; empty unless requested


class Machine(Protocol):
    """The GPUs of a machine, observed without creating a context. Methods take devices of ``nvml()``."""

    @property
    def simulated(self) -> bool:
        """Whether the GPUs are simulated."""

    def nvml(self, *, links: bool = False) -> NvmlView | Unavailable:
        """Return the NVML view; ``links`` adds the connections between GPUs, which takes longer."""

    def cuda(self) -> CudaView | Unavailable:
        """Return the CUDA driver view, after waiting for the child process that queries it."""

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        """Read all telemetry fields, or only ``names``; Unavailable if the device is lost."""

    def activity(self, device: DeviceFacts, names: Collection[str] = ()) -> Telemetry | Unavailable:
        """Read the activity since the previous call (NVML GPM: Hopper and newer)."""

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        """List the processes that use the device."""


def throttling_cause(reason: str) -> str:
    """Return the name of a clock event reason in reports: "power limit", or NVML's name of another reason."""
    return "power limit" if reason == "software power cap" else reason


# --- The run context: facts about host, driver, environment, limits, packages and processes --------
#
# ``cudakit.gpu.run_context`` gathers these values once; checks and results read them.

_NOT_GATHERED = Unavailable("not gathered")

SHARED_MEMORY = "/dev/shm"  # noqa: S108 the mount point of POSIX shared memory; nothing is written there
MPS_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108 the default of CUDA_MPS_PIPE_DIRECTORY


@dataclass(frozen=True, slots=True)
class Host:
    """The operating system and CPU. Unknown text fields are ""."""

    cpu: str = ""  # model name of the CPU
    system: str = ""  # name of the operating system: "Linux"
    kernel: str = ""  # release of the kernel: "6.8.0-60-generic"
    distribution: str = ""  # name of the distribution: "Ubuntu 24.04.3 LTS"
    distribution_id: str = ""  # id of the distribution: "ubuntu"
    container: str = ""  # container runtime: "docker"; "" outside containers
    # Whether this is the Windows Subsystem for Linux, with the GPU behind /dev/dxg.
    is_wsl: bool = False
    is_jetson: bool = False  # whether this is a Tegra system, whose GPU is not a PCI device
    secure_boot: bool = False  # whether the kernel loads only signed modules
    overcommit_memory: str = ""  # vm.overcommit_memory
    infiniband: tuple[str, ...] = ()  # names of InfiniBand adapters
    available_bytes: int | Unavailable = NOT_QUERIED  # memory that this process can still allocate
    shared_memory_bytes: int | Unavailable = _NOT_GATHERED  # size of the file system SHARED_MEMORY

    def summary(self) -> dict[str, str]:
        """Return the host facts that results record, without unknown values."""
        facts = {"cpu": self.cpu, "system": self.system, "kernel": self.kernel}
        return {name: value for name, value in facts.items() if value}


@dataclass(frozen=True, slots=True)
class KernelModule:
    """The loaded NVIDIA kernel module."""

    version: str  # version of the driver: "580.65.06"
    is_open: bool  # whether the module is the open-source variant


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device file under /dev of the NVIDIA driver."""

    path: str
    mode: str  # permissions as in ls -l
    error: str  # errno name if opening for read and write fails, else ""


@dataclass(frozen=True, slots=True)
class PciGpu:
    """An NVIDIA GPU on the PCI bus."""

    address: str  # PCI address: "0000:65:00.0"
    driver: str  # bound kernel driver, "" if none
    is_gone: bool  # whether the GPU has fallen off the bus: its registers read as all ones


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    directory: str
    file_system: str  # type of the file system, such as "ext4"


@dataclass(frozen=True, slots=True)
class Driver:
    """The state of the NVIDIA driver according to /proc, /sys and /dev."""

    module: KernelModule | None = None  # kernel module; None if not loaded or not visible
    module_installed: bool = False  # whether nvidia.ko exists for the running kernel
    nouveau_loaded: bool = False
    parameters: Mapping[str, str] | None = None  # module parameters; None if not visible
    device_nodes: tuple[DeviceNode, ...] = ()
    pci_gpus: tuple[PciGpu, ...] = ()
    kernel_log: tuple[str, ...] | Unavailable = _NOT_GATHERED
    mps_pipes: bool = False  # whether the MPS pipe directory has a control pipe
    wsl_libcuda: bool = False  # whether Windows provides libcuda, in WSL
    nvidia_fs: str = ""  # version of the driver of GPUDirect Storage; empty if it is not loaded
    mounts: tuple[Mount, ...] = ()  # file systems that GPUDirect Storage supports
    udev_database: bool = True  # whether udev's database exists, in which cuFile looks up drives


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed Python package, under the normalized form of its name."""

    name: str
    version: str
    directory: str  # directory of the package's modules


@dataclass(frozen=True, slots=True)
class Build:
    """The CUDA version that a framework was built for."""

    framework: str
    version: str
    # Major and minor CUDA version; the minor version is None if it is unknown. None if built without CUDA.
    cuda: tuple[int, int | None] | None


@dataclass(frozen=True, slots=True)
class Library:
    """One installed copy of a CUDA library."""

    soname: str
    path: str
    real: str  # path with symbolic links resolved
    source: str  # "LD_LIBRARY_PATH", "package", "system" (ldconfig cache) or "toolkit"


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A CUDA toolkit under /usr/local."""

    path: str
    cuda: tuple[int, int]  # CUDA version: major, minor


@dataclass(frozen=True, slots=True)
class Software:
    """Installed packages, libraries and toolkits, and configuration files."""

    distributions: (
        tuple[Distribution, ...] | Unavailable
    ) = ()  # distributions in the order of sys.path
    builds: tuple[Build, ...] | Unavailable = ()
    libraries: (
        tuple[Library, ...] | Unavailable
    ) = ()  # libraries in the order of the dynamic loader
    toolkits: tuple[Toolkit, ...] = ()
    nccl_conf: Mapping[str, str] = field(default_factory=dict)  # variables set by /etc/nccl.conf
    missing_extensions: tuple[str, ...] = ()  # C extensions of cudakit that are not built


@dataclass(frozen=True, slots=True)
class Limits:
    """Soft resource limits of this process; None means unlimited."""

    address_space_bytes: int | None
    locked_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class SelfTestStep:
    """The result of one self-test step (``doctor --deep``) on all devices."""

    name: str  # "context", "compile", "kernel" or "copy"
    error: str = ""  # "" if all devices passed
    hint: str = ""
    details: Mapping[str, str] = field(default_factory=dict)  # details by device: "16.0 MiB free"


@dataclass(frozen=True, slots=True)
class RunContext:
    """All facts about a run. The defaults describe an empty machine."""

    simulated: bool = False  # whether the GPUs are simulated
    variables: Mapping[str, str] = field(default_factory=dict)  # the process environment
    command: tuple[str, ...] = ()  # the command line
    versions: Mapping[str, str] = field(default_factory=dict)  # driver, CUDA, cudakit, Python
    host: Host = Host()
    driver: Driver = Driver()
    software: Software = Software()
    limits: Limits | Unavailable = _NOT_GATHERED
    privileged: bool = False  # whether this process has CAP_SYS_ADMIN
    processes: frozenset[str] | Unavailable = _NOT_GATHERED  # names of all running processes
    nvml: NvmlView | Unavailable = _NOT_GATHERED
    cuda: CudaView | Unavailable = _NOT_GATHERED
    telemetry: tuple[Telemetry | Unavailable, ...] = ()  # telemetry in the order of nvml.devices
    nvml_device: DeviceFacts | None = None  # the CUDA device in use, as NVML describes it
    other_processes: int | Unavailable = NOT_QUERIED  # number of processes on ``nvml_device``
    self_test: tuple[SelfTestStep, ...] | Unavailable = ()

    @property
    def cuda_devices(self) -> tuple[DeviceFacts, ...]:
        """The devices visible to CUDA; empty if CUDA is unavailable."""
        return () if isinstance(self.cuda, Unavailable) else self.cuda.devices

    @property
    def nvml_devices(self) -> tuple[DeviceFacts, ...]:
        """The devices visible to NVML; empty if NVML is unavailable."""
        return () if isinstance(self.nvml, Unavailable) else self.nvml.devices

    @property
    def cuda_error(self) -> int | None:
        """The error code of cuInit; None if it succeeded or was not called."""
        error = None if isinstance(self.cuda, Unavailable) else self.cuda.error
        return error[0] if error else None

    @property
    def cuda_remedy(self) -> str:
        """The advice for the error of cuInit, "" if there is none."""
        return "" if self.cuda_error is None else remedy_of(self.cuda_error)


# --- Names of NVIDIA GPU architectures by compute capability ---------------------------------------
#
# From the CUDA C++ Programming Guide, "Compute Capabilities", and developer.nvidia.com/cuda-gpus.

_NAME_BY_CAPABILITY = MappingProxyType({(7, 5): "Turing", (8, 9): "Ada Lovelace"})
_NAME_BY_MAJOR = MappingProxyType(
    {
        5: "Maxwell",
        6: "Pascal",
        7: "Volta",
        8: "Ampere",
        9: "Hopper",
        10: "Blackwell",
        11: "Blackwell",
        12: "Blackwell",
    }
)


class Capability(NamedTuple):
    """A compute capability, comparable with tuples: ``capability() >= (8, 0)``."""

    major: int
    minor: int

    @property
    def architecture(self) -> str:
        """The architecture name, such as "Hopper"; "unknown" if it is newer than this table."""
        return _NAME_BY_CAPABILITY.get(self) or _NAME_BY_MAJOR.get(self.major, "unknown")

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


# --- The device fields that NVML and the CUDA driver report: unit, meaning, and the NVML call of each ---

Kind = Literal["identity", "fact", "telemetry", "activity"]

# The group of fields that only MIG instances have.
INSTANCE_GROUP = "MIG instance"

# Matches "function(arguments)" or "field_id(scope)", followed by the part of the result to use.
_CALL = re.compile(r"(\w+)(?:\(([\w,]+)\))?(\S*)")


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of a device."""

    name: str  # name of the field, as --fields accepts it
    unit: str  # printed after the number; "" for none; "bytes", "bool" and "hex" select a format
    source: str  # NVML function or field id, or CUDA attribute
    description: str  # meaning of the field
    group: str  # heading above the field in --long
    kind: Kind  # which query reads the field


@dataclass(frozen=True, slots=True)
class NvmlField:
    """One NVML field and the call that reads it."""

    info: FieldInfo
    arguments: tuple[str, ...]  # numbers or names of nvidia-ml-py constants
    result_part: str  # the part of the result to use: ".member", "[index]", or "" for all


def nvml_fields() -> Iterator[NvmlField]:
    """Yield the NVML fields in display order: facts, telemetry, and activity between two reads."""
    for row in _rows("nvml_fields.csv"):
        match = re.fullmatch(_CALL, row["call"])
        assert match, row  # noqa: S101 the table is a constant
        source, arguments, result_part = match.groups(default="")
        info = FieldInfo(
            row["name"],
            row["unit"],
            source,
            row["meaning"],
            row["group"],
            cast("Kind", row["kind"]),
        )
        yield NvmlField(info, tuple(filter(None, arguments.split(","))), result_part)


def _rows(table: str) -> Iterator[dict[str, str]]:
    text = files("cudakit.gpu.api").joinpath(table).read_text("utf-8")
    return csv.DictReader(text.splitlines())


# --- The device attributes of the CUDA driver: number, name, unit and meaning ----------------------
#
# From CUdevice_attribute of the CUDA Driver API 13.5 (cuda.h). Names are CUDA's, in lower case, with
# units. ``pci_bus_id`` is the full PCI address. Unsupported attributes become Unavailable fields.

# The names of the bits of each bit mask, from bit 0 on.
BIT_NAMES = {
    "gpu_direct_rdma_flush_writes_options": ("host call", "stream memory operation"),
    "mempool_supported_handle_types": (
        "POSIX file descriptor",
        "Win32",
        "Win32 KMT",
        "fabric",
    ),
    "mem_decompress_algorithm_mask": ("Deflate", "Snappy", "LZ4"),
    "logical_endpoint_supported_handle_types": ("fabric",),
}


@dataclass(frozen=True, slots=True)
class Attribute:
    """One CUdevice_attribute."""

    number: int
    name: str
    unit: str  # "bytes", "kHz", "bits", "bool", "mask", "hex", "word" or "" for a plain number
    description: str


def attributes() -> tuple[Attribute, ...]:
    """Return all attributes in the order of CUdevice_attribute."""
    return tuple(
        Attribute(int(row["number"]), row["name"], row["unit"], row["meaning"])
        for row in _rows("cuda_attributes.csv")
    )
