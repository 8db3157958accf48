"""Read facts, telemetry, processes and links of GPUs through NVML, with nvidia-ml-py (``pynvml``).

Nothing is changed and no CUDA context is created; a process that has used NVML can still fork. A field that
NVML cannot read is Unavailable with the reason; the other fields are still read.
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

from cudakit.gpu.api.facts import (
    DeviceFacts,
    Field,
    FieldInfo,
    Link,
    NvmlView,
    Process,
    Telemetry,
    nvml_fields,
)
from cudakit.gpu.nvml.readings import (
    FACT_READINGS,
    INSTANCE_READINGS,
    INVALID_ARGUMENT,
    NAMES,
    NOT_SUPPORTED,
    OLD_MEMORY_READINGS,
    TELEMETRY_READINGS,
    UNKNOWN,
    Call,
    Reader,
    name_from,
)
from cudakit.units import Unavailable

# By nvmlReturn_t (nvml.h), as nvmlInit returns it.
_INIT_REASONS = {
    4: "no permission to open /dev/nvidia*",
    9: "the NVIDIA kernel driver is not loaded",
    12: "libnvidia-ml.so.1 (NVML) cannot be loaded",
    18: "the kernel driver and libnvidia-ml have different versions",
}
_WSL_REASONS = {UNKNOWN: "the WSL driver does not report it (NVML: Unknown Error)"}
_NOT_FOR_MIG = "not reported for a MIG instance: see its GPU"
# Neither a MIG instance nor its GPU has a utilization (nvml.h, nvmlDeviceGetUtilizationRates).
_NO_MIG_UTILIZATION = Unavailable("utilization is not counted where MIG is on")
_MIG_REASONS = {NOT_SUPPORTED: _NOT_FOR_MIG, INVALID_ARGUMENT: _NOT_FOR_MIG}


def open_nvml(lib: Any = None, *, is_wsl: bool | None = None) -> Nvml | Unavailable:
    """Initialize NVML, or return why it fails. ``lib`` replaces pynvml, ``is_wsl`` the detection of WSL."""
    if lib is None:
        try:
            lib = import_module("pynvml")
        except ImportError:
            return Unavailable("nvidia-ml-py is not installed: pip install nvidia-ml-py")
    try:
        lib.nvmlInit()
    except lib.NVMLError as error:
        return Unavailable(_INIT_REASONS.get(error.value, f"NVML cannot be initialized: {error}"))
    runs_in_wsl = Path("/dev/dxg").exists() if is_wsl is None else is_wsl
    return Nvml(lib, _WSL_REASONS if runs_in_wsl else {})


@dataclass(slots=True)
class Nvml:
    """The initialized NVML; it stays initialized until the process ends."""

    lib: Any
    reasons: Mapping[int, str]  # texts by error code, which replace the default texts
    _handles: dict[tuple[int | None, int], Any] = field(default_factory=dict)
    # The previous GPM sample of each device.
    _samples: dict[tuple[int | None, int], Any] = field(default_factory=dict)

    def view(self) -> NvmlView:
        """Return the devices with their constant facts, without links."""
        reader = Reader(self.lib, None)
        return NvmlView(
            driver_version=reader.attempt(self.lib.nvmlSystemGetDriverVersion),
            nvml_version=reader.attempt(self.lib.nvmlSystemGetNVMLVersion),
            devices=tuple(self._devices()),
            links=(),
        )

    def capabilities(self) -> frozenset[tuple[int, int]] | Unavailable:
        """Return the compute capabilities of all GPUs; Unavailable if one cannot be read."""
        capabilities = set()
        for index in range(self._device_count()):
            reader = self._open_gpu(index)
            if isinstance(reader, Unavailable):
                return reader
            capability = reader.call("nvmlDeviceGetCudaComputeCapability")
            if isinstance(capability, Unavailable):
                return capability
            major, minor = capability
            capabilities.add((major, minor))
        return frozenset(capabilities)

    def links(self, view: NvmlView) -> tuple[Link, ...]:
        """Return the links between the GPUs of a view."""
        handles = {
            gpu.index: self._handles.get((None, gpu.index))
            for gpu in view.devices
            if gpu.parent is None
        }
        return tuple(
            _links(
                self.lib, {index: handle for index, handle in handles.items() if handle is not None}
            )
        )

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        """Read the telemetry, limited to ``names``; Unavailable if the device is lost."""
        reader = self._reader(device)
        if isinstance(reader, Unavailable):
            return reader
        fields = reader.read(TELEMETRY_READINGS, names)
        if isinstance(fields.get("memory_used_bytes"), Unavailable) and not reader.is_lost:
            fields |= reader.read(OLD_MEMORY_READINGS, names)
        if reader.is_lost:
            return Unavailable("the GPU has fallen off the bus")
        return Telemetry(
            time.time_ns(),
            {
                name: _NO_MIG_UTILIZATION
                if name.startswith("utilization_") and value == Unavailable(_NOT_FOR_MIG)
                else value
                for name, value in fields.items()
            },
        )

    def activity(self, device: DeviceFacts, names: Collection[str] = ()) -> Telemetry | Unavailable:
        """Read the activity since the previous call, limited to ``names``.

        Activity is the share of the hardware that is in use; ``utilization`` is only the share of time in
        which at least one kernel ran. NVML's GPM (Hopper and newer) uses the same counters as DCGM, so it is
        sampled only while activity is shown.
        """
        reader = self._reader(device)
        if isinstance(reader, Unavailable):
            return reader
        lib, key = self.lib, (device.parent, device.index)
        # GPM takes the handle of the GPU, also for a MIG instance.
        gpu = reader.handle if device.parent is None else self._handles[None, device.parent]
        support = reader.attempt(lambda: lib.nvmlGpmQueryDeviceSupport(gpu))
        if isinstance(support, Unavailable):
            return support
        if not support.isSupportedDevice:
            return Unavailable("the GPU does not measure it (NVML GPM needs Hopper or newer)")
        instance = None if device.parent is None else device.fields.get("gpu_instance_id")
        sample = reader.attempt(lib.nvmlGpmSampleAlloc)
        if not isinstance(sample, Unavailable):
            sample = reader.attempt(
                (lambda: lib.nvmlGpmMigSampleGet(gpu, instance, sample))
                if isinstance(instance, int)
                else (lambda: lib.nvmlGpmSampleGet(gpu, sample))
            )
        if isinstance(sample, Unavailable):
            return sample
        previous_sample, self._samples[key] = self._samples.get(key), sample
        infos = [info for name, info in METRICS.items() if not names or name in names]
        if previous_sample is None:
            return Telemetry(time.time_ns(), {info.name: _FIRST_SAMPLE for info in infos})
        fields = reader.attempt(lambda: _metrics(reader, infos, previous_sample, sample))
        reader.attempt(lambda: lib.nvmlGpmSampleFree(previous_sample))
        return fields if isinstance(fields, Unavailable) else Telemetry(time.time_ns(), fields)

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        """Return the processes that use a device."""
        reader = self._reader(device)
        return reader if isinstance(reader, Unavailable) else processes(reader)

    def _devices(self) -> Iterator[DeviceFacts]:
        for index in range(self._device_count()):
            facts = self._gpu(index)
            yield facts
            if facts.fields.get("mig_mode") is True:
                yield from self._instances(facts)

    def _device_count(self) -> int:
        device_count = Reader(self.lib, None).attempt(self.lib.nvmlDeviceGetCount)
        return 0 if isinstance(device_count, Unavailable) else int(device_count)

    def _open_gpu(self, index: int) -> Reader | Unavailable:
        reader = Reader(self.lib, None, self.reasons)
        reader.handle = reader.attempt(lambda: self.lib.nvmlDeviceGetHandleByIndex(index))
        return reader.handle if isinstance(reader.handle, Unavailable) else reader

    def _gpu(self, index: int) -> DeviceFacts:
        reader = self._open_gpu(index)
        if isinstance(reader, Unavailable):
            return DeviceFacts(index, uuid=reader, pci_bus_id=reader, fields={})
        self._handles[None, index] = reader.handle
        info = reader.result(Call("nvmlDeviceGetPciInfo"))
        domain, _, remainder = _bus_id(info).partition(":")
        return DeviceFacts(
            index,
            uuid=reader.result(Call("nvmlDeviceGetUUID")),
            # Linux and CUDA write four digits of the domain, NVML eight.
            pci_bus_id=f"{domain.lstrip('0').rjust(4, '0')}:{remainder}" if domain else info,
            fields=reader.read(FACT_READINGS),
        )

    def _instances(self, gpu: DeviceFacts) -> Iterator[DeviceFacts]:
        parent_handle = self._handles[None, gpu.index]
        max_instances = gpu.fields.get("mig_instances_max")
        for index in range(max_instances if isinstance(max_instances, int) else 0):
            reader = Reader(self.lib, None, {**self.reasons, **_MIG_REASONS})
            get_handle = partial(self.lib.nvmlDeviceGetMigDeviceHandleByIndex, parent_handle, index)
            handle = reader.attempt(get_handle)
            if isinstance(handle, Unavailable):
                continue  # no MIG instance has this index
            self._handles[gpu.index, index] = reader.handle = handle
            yield DeviceFacts(
                index,
                uuid=reader.result(Call("nvmlDeviceGetUUID")),
                pci_bus_id=gpu.pci_bus_id,
                fields=reader.read({**FACT_READINGS, **INSTANCE_READINGS}),
                parent=gpu.index,
            )

    def _reader(self, device: DeviceFacts) -> Reader | Unavailable:
        handle = self._handles.get((device.parent, device.index))
        if handle is None:
            if isinstance(device.uuid, Unavailable):
                return device.uuid
            return Unavailable("NVML does not report the device")
        return Reader(
            self.lib,
            handle,
            self.reasons if device.parent is None else {**self.reasons, **_MIG_REASONS},
        )


def _bus_id(info: Any) -> str:
    """Return the PCI address of an answer of NVML, with eight digits of the domain; "" without an answer."""
    if info is None or isinstance(info, Unavailable):
        return ""
    return (info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)).lower()


# --- The activity of a GPU between two samples of its counters -------------------------------------

_MIB = 2**20
_FIRST_SAMPLE = Unavailable("needs a second sample")

# The activity fields by name. NVML returns rates in MiB per second.
METRICS = {field.info.name: field.info for field in nvml_fields() if field.info.kind == "activity"}


def _metrics(
    reader: Reader, infos: Collection[FieldInfo], previous_sample: Any, sample: Any
) -> dict[str, Field]:
    lib = reader.lib
    request = lib.c_nvmlGpmMetricsGet_t()
    request.version = lib.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(infos)
    request.sample1, request.sample2 = previous_sample, sample
    for metric, info in zip(request.metrics, infos, strict=False):
        metric.metricId = getattr(lib, info.source)
    lib.nvmlGpmMetricsGet(request)
    return {
        info.name: reader.reason(metric.nvmlReturn)
        if metric.nvmlReturn
        else float(metric.value) * (_MIB if info.unit == "B/s" else 1)
        for metric, info in zip(request.metrics, infos, strict=False)
    }


# --- The link of each pair of GPUs, as NVML reports it ---------------------------------------------

_NVLINK_ACTIVE = 1  # NVML_FEATURE_ENABLED
# nvmlGpuP2PCapsIndex_t (nvml.h); some of nvidia-ml-py's constants are not numbers.
_P2P_CAPABILITIES = range(4)  # read, write, NVLink, atomics
_SWITCH = "switch"


def _links(lib: Any, handles: Mapping[int, Any]) -> Iterator[Link]:
    readers = {index: Reader(lib, handle) for index, handle in sorted(handles.items())}
    remote_ends = {index: _nvlink_ends(reader) for index, reader in readers.items()}
    buses = {
        index: _bus_id(reader.call("nvmlDeviceGetPciInfo")) for index, reader in readers.items()
    }
    for (first, reader), (second, peer) in combinations(readers.items(), 2):
        read, write, nvlink, atomics = (
            _call_named(reader, "nvmlDeviceGetP2PStatus", NAMES["p2p"], peer.handle, capability)
            for capability in _P2P_CAPABILITIES
        )
        # Direct links, or else those that a switch can connect.
        first_ends, second_ends = remote_ends[first], remote_ends[second]
        direct_count = min(first_ends.count(buses[second]), second_ends.count(buses[first]))
        nvlink_count = direct_count or min(first_ends.count(_SWITCH), second_ends.count(_SWITCH))
        if nvlink != NAMES["p2p"][0]:
            nvlink_count = 0
        path = _call_named(
            reader, "nvmlDeviceGetTopologyCommonAncestor", NAMES["path"], peer.handle
        )
        yield Link(
            first=first,
            second=second,
            path=f"NV{nvlink_count}" if nvlink_count else path,
            nvlinks=nvlink_count,
            p2p_read=read,
            p2p_write=write,
            p2p_atomics=atomics,
        )


def _call_named(
    reader: Reader, function: str, names: Mapping[int, str], *arguments: Any
) -> str | Unavailable:
    result = reader.call(function, *arguments)
    return result if isinstance(result, Unavailable) else name_from(names)(result)


def _nvlink_ends(reader: Reader) -> list[str]:
    """Return the remote end of each active NVLink: the PCI address of a GPU, or a switch."""
    remote_ends = []
    for link_index in range(reader.lib.NVML_NVLINK_MAX_LINKS):
        state = reader.call("nvmlDeviceGetNvLinkState", link_index)
        if isinstance(state, Unavailable):
            break  # the GPU has no more links
        if state == _NVLINK_ACTIVE:
            device_type = reader.call("nvmlDeviceGetNvLinkRemoteDeviceType", link_index)
            is_gpu = device_type == reader.lib.NVML_NVLINK_DEVICE_TYPE_GPU
            info = reader.call("nvmlDeviceGetNvLinkRemotePciInfo", link_index) if is_gpu else None
            remote_ends.append(_bus_id(info) or _SWITCH)
    return remote_ends


# --- The processes on a device, with their SM utilization, memory and runtime ----------------------

# Suffixes of the function versions, newest first: nvidia-ml-py does not select the version that the driver
# has.
_FUNCTION_SUFFIXES = ("_v3", "_v2", "")
_FUNCTION_BY_KIND = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
    "MPS": "nvmlDeviceGetMPSComputeRunningProcesses",
}
_OTHER_NAMESPACE = Unavailable("the pid belongs to the host or to another container")
_MEMORY_NOT_REPORTED = Unavailable("the driver does not report memory per process (WDDM or WSL)")
# If no process has used the SMs since the last sample, NVML returns NVML_SUCCESS with no sample, or
# NVML_ERROR_NOT_FOUND.
_NO_SAMPLE_CODES = (0, 6)
# Index of the start time, field 22 of /proc/PID/stat, among the fields after the command, field 2
# (proc_pid_stat(5)). It is in clock ticks since boot.
_START_TIME_INDEX = 22 - 3


def processes(
    reader: Reader, *, proc_directory: Path = Path("/proc")
) -> tuple[Process, ...] | Unavailable:
    """Return the processes, sorted by kind and pid; Unavailable if NVML reports no kind of process."""
    kinds_and_processes: list[tuple[str, Any]] = []
    errors: list[Unavailable] = []
    for kind, function in _FUNCTION_BY_KIND.items():
        result = _running_processes(reader, function)
        if isinstance(result, Unavailable):
            errors.append(result)
        else:
            kinds_and_processes += ((kind, process) for process in result)
    if len(errors) == len(_FUNCTION_BY_KIND):
        return errors[0]
    utilization = _sm_utilization(reader) if kinds_and_processes else {}
    running_processes = (
        _process(kind, process, utilization, proc_directory)
        for kind, process in kinds_and_processes
    )
    return tuple(sorted(running_processes, key=lambda process: (process.kind, process.pid)))


def _running_processes(reader: Reader, function_name: str) -> Any:
    result: Any = Unavailable("this driver does not report processes")
    for suffix in _FUNCTION_SUFFIXES:
        nvml_function = getattr(reader.lib, function_name + suffix, None)
        if nvml_function is not None:
            result = reader.attempt(partial(nvml_function, reader.handle))
            if not isinstance(result, Unavailable):
                break
    return result


def _sm_utilization(reader: Reader) -> Mapping[int, int] | Unavailable:
    """Return the SM utilization in percent of each process that has used the SMs, by pid.

    NVML returns a sample for each process with a nonzero utilization (nvmlDeviceGetProcessUtilization).
    """
    try:
        samples = reader.lib.nvmlDeviceGetProcessUtilization(reader.handle, 0)
    except reader.lib.NVMLError as error:
        return {} if error.value in _NO_SAMPLE_CODES else reader.reason(error.value)
    except AttributeError:
        return Unavailable("this nvidia-ml-py does not report utilization by process")
    samples_by_time = sorted(samples, key=lambda sample: sample.timeStamp)
    # Some drivers return samples without values; their utilization is above 100 %.
    return {sample.pid: sample.smUtil for sample in samples_by_time if sample.smUtil <= 100}


def _process(
    kind: str, nvml_process: Any, utilization: Mapping[int, int] | Unavailable, proc_directory: Path
) -> Process:
    directory = proc_directory / str(nvml_process.pid)
    used_bytes = nvml_process.usedGpuMemory
    return Process(
        pid=nvml_process.pid,
        kind=kind,
        used_bytes=_MEMORY_NOT_REPORTED if used_bytes is None else used_bytes,
        name=_command_line(directory),
        user=_user_name(directory),
        sm_percent=utilization
        if isinstance(utilization, Unavailable)
        else utilization.get(nvml_process.pid, 0),
        runtime_s=_runtime(directory, proc_directory),
    )


def _command_line(directory: Path) -> str | Unavailable:
    try:
        arguments = directory.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return _OTHER_NAMESPACE
    return " ".join(filter(None, arguments)) or _OTHER_NAMESPACE


def _user_name(directory: Path) -> str | Unavailable:
    try:
        uid = os.stat(directory).st_uid
    except OSError:
        return _OTHER_NAMESPACE
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _runtime(directory: Path, proc_directory: Path) -> float | Unavailable:
    """Return the seconds since a process started."""
    try:
        # The command is in parentheses, and may contain spaces and parentheses.
        fields_after_command = (
            directory.joinpath("stat").read_text(errors="replace").rpartition(")")[2]
        )
        start_s = int(fields_after_command.split()[_START_TIME_INDEX]) / os.sysconf("SC_CLK_TCK")
        return float(proc_directory.joinpath("uptime").read_text().split()[0]) - start_s
    except (OSError, ValueError, IndexError):
        return _OTHER_NAMESPACE
