"""The device, its state and the software that a result records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cudakit.gpu.api.facts import NOT_QUERIED, DeviceFacts, Field, RunContext, Scalar, Telemetry
from cudakit.units import Unavailable

_MODE_FIELDS = ("mig_mode", "mps_enabled", "ecc_enabled", "persistence_mode", "compute_mode")
# The reason for throttling, by the NVML counter of the throttled time.
_THROTTLING_COUNTERS = {
    "slowed_by_power_cap_ns": "power limit",
    "slowed_by_sync_boost_ns": "sync boost",
    "slowed_by_software_thermal_ns": "heat, by software",
    "slowed_by_hardware_thermal_ns": "heat, by hardware",
    "slowed_by_power_brake_ns": "power brake",
}
# Prefixes of environment variables that affect CUDA and its libraries.
_VARIABLE_PREFIXES = (
    "CUDA_",
    "CUBLAS",
    "NCCL_",
    "NVIDIA_",
    "PYTORCH_",
    "TORCH_",
    "CUPY_",
    "OMP_NUM_",
)


@dataclass(frozen=True, slots=True)
class Moment:
    """The telemetry of a device at one time."""

    time_ns: int  # Nanoseconds since 1970.
    # SM clock that NVML reports; the clock that kernels measure is more accurate.
    sm_clock_mhz: float | Unavailable
    memory_clock_mhz: float | Unavailable  # Memory clock.
    temperature_c: float | Unavailable  # Temperature of the GPU core.
    memory_temperature_c: float | Unavailable  # Temperature of the memory.
    power_w: float | Unavailable  # Mean power of the last second.
    energy_j: float | Unavailable  # Energy consumed since the driver was loaded.
    clock_reasons: tuple[str, ...] | Unavailable  # Reasons why the clock is not higher.
    # Throttled time since the driver was loaded, by reason.
    slowed_ns: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Environment:
    """The conditions of a measurement apart from its options."""

    simulated: bool  # Whether the device is simulated.
    gpu: str | Unavailable  # Name of the GPU model.
    uuid: str | Unavailable  # UUID of the GPU.
    pci_bus_id: str | Unavailable  # PCI address of the GPU.
    compute_capability: str | Unavailable  # Compute capability of the GPU.
    multiprocessors: int | Unavailable  # Number of SMs.
    sm_clock_max_mhz: float | Unavailable  # Maximum SM clock.
    memory_clock_mhz: float | Unavailable  # Maximum memory clock.
    memory_bus_bits: int | Unavailable  # Width of the memory bus.
    memory_bytes: int | Unavailable  # Total device memory that CUDA reports.
    l2_bytes: int | Unavailable  # Size of the L2 cache.
    pcie: str | Unavailable  # Fastest PCIe link that GPU and slot support: "5.0 x16".
    power_limit_w: float | Unavailable  # Enforced power limit.
    power_limit_default_w: float | Unavailable  # Default power limit.
    # MIG, MPS, ECC, persistence and compute mode, by NVML field.
    modes: Mapping[str, Scalar | Unavailable]
    versions: Mapping[str, str]  # Versions of driver, CUDA, libraries, cudakit and Python.
    other_processes: int | Unavailable = NOT_QUERIED  # Number of other processes on the GPU.
    host: Mapping[str, str] = field(default_factory=dict)  # Host CPU, NUMA node, container.
    # Environment variables that affect CUDA.
    variables: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()  # Command line of the run.
    before: Moment | None = None  # Telemetry before the first sample.
    after: Moment | None = None  # Telemetry after the last sample.

    @property
    def throttled_seconds(self) -> Mapping[str, float]:
        """Throttled time in seconds between ``before`` and ``after``, by reason."""
        if self.before is None or self.after is None:
            return {}
        before_ns = self.before.slowed_ns
        throttled_s = {
            reason: (reason_ns - before_ns[reason]) / 1e9
            for reason, reason_ns in self.after.slowed_ns.items()
            if reason in before_ns
        }
        return {reason: seconds for reason, seconds in throttled_s.items() if seconds > 0}

    def differences_from(self, other_environment: Environment) -> tuple[str, ...]:
        """Return the differences that make results in two environments incomparable."""
        # The versions of cudakit and Python do not change what the device does.
        setting_names = sorted(
            (self.versions.keys() | other_environment.versions.keys()) - {"cudakit", "python"}
        )
        values_by_setting: list[tuple[str, object, object]] = [
            ("GPU", self.gpu, other_environment.gpu),
            ("simulated", self.simulated, other_environment.simulated),
            ("SMs", self.multiprocessors, other_environment.multiprocessors),
            *(
                (name, self.versions.get(name), other_environment.versions.get(name))
                for name in setting_names
            ),
        ]
        return tuple(
            f"{setting}: {_value_text(this_value)} before, {_value_text(other_value)} after"
            for setting, this_value, other_value in values_by_setting
            if this_value != other_value
        )


def environment(
    facts: DeviceFacts,
    run_context: RunContext,
    *,
    simulated: bool,
    before: Telemetry | None = None,
    after: Telemetry | None = None,
) -> Environment:
    """Return the Environment of the device that ``facts`` of CUDA describe.

    Of the environment variables, only those that affect CUDA are recorded.
    """
    nvml_device = run_context.nvml_device
    nvml_and_cuda: dict[str, Field] = {
        **(nvml_device.fields if nvml_device else {}),
        **facts.fields,
    }
    telemetry = after or before
    telemetry_fields = telemetry.fields if telemetry else {}
    return Environment(
        simulated=simulated,
        gpu=_text_field(nvml_and_cuda, "name"),
        uuid=facts.uuid,
        pci_bus_id=facts.pci_bus_id,
        compute_capability=_text_field(nvml_and_cuda, "compute_capability"),
        multiprocessors=_integer_field(nvml_and_cuda, "multiprocessor_count"),
        sm_clock_max_mhz=_number_field(nvml_and_cuda, "clock_rate_khz", 1e-3),
        memory_clock_mhz=_number_field(nvml_and_cuda, "memory_clock_rate_khz", 1e-3),
        memory_bus_bits=_integer_field(nvml_and_cuda, "global_memory_bus_width_bits"),
        memory_bytes=_integer_field(nvml_and_cuda, "usable_memory_bytes"),
        l2_bytes=_integer_field(nvml_and_cuda, "l2_cache_size_bytes"),
        pcie=_pcie_text(nvml_and_cuda),
        power_limit_w=_number_field(telemetry_fields, "power_limit_enforced_w"),
        power_limit_default_w=_number_field(nvml_and_cuda, "power_limit_default_w"),
        modes={
            name: _mode_name(nvml_and_cuda[name]) for name in _MODE_FIELDS if name in nvml_and_cuda
        },
        versions=dict(sorted(run_context.versions.items())),
        other_processes=run_context.other_processes,
        host=run_context.host.summary(),
        variables=relevant_variables(run_context.variables),
        command=run_context.command,
        before=moment(before) if before else None,
        after=moment(after) if after else None,
    )


def moment(telemetry: Telemetry) -> Moment:
    """Return the telemetry that may explain a measured time."""
    fields = telemetry.fields
    clock_reasons = fields.get("clock_event_reasons", NOT_QUERIED)
    return Moment(
        time_ns=telemetry.time_ns,
        sm_clock_mhz=_number_field(fields, "clock_sm_mhz"),
        memory_clock_mhz=_number_field(fields, "clock_memory_mhz"),
        temperature_c=_number_field(fields, "temperature_gpu_c"),
        memory_temperature_c=_number_field(fields, "temperature_memory_c"),
        power_w=_number_field(fields, "power_draw_w"),
        energy_j=_number_field(fields, "energy_j"),
        clock_reasons=tuple(map(str, clock_reasons))
        if isinstance(clock_reasons, tuple)
        else _unavailable(clock_reasons),
        slowed_ns={
            reason: reason_ns
            for name, reason in _THROTTLING_COUNTERS.items()
            if isinstance(reason_ns := fields.get(name), int)
        },
    )


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that affect CUDA and its libraries, sorted by name."""
    return {
        name: variables[name] for name in sorted(variables) if name.startswith(_VARIABLE_PREFIXES)
    }


def _number_field(
    fields: Mapping[str, Field], name: str, factor: float | None = None
) -> float | Unavailable:
    value = fields.get(name, NOT_QUERIED)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if factor is None else value * factor
    return _unavailable(value)


def _integer_field(fields: Mapping[str, Field], name: str) -> int | Unavailable:
    value = fields.get(name, NOT_QUERIED)
    return value if isinstance(value, int) else _unavailable(value)


def _text_field(fields: Mapping[str, Field], name: str) -> str | Unavailable:
    value = fields.get(name, NOT_QUERIED)
    return value if isinstance(value, Unavailable) else str(value)


def _mode_name(value: Field) -> Scalar | Unavailable:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else value


def _unavailable(value: Field) -> Unavailable:
    return value if isinstance(value, Unavailable) else Unavailable(f"unexpected value {value!r}")


def _pcie_text(fields: Mapping[str, Field]) -> str | Unavailable:
    generation = fields.get("pcie_generation_max", NOT_QUERIED)
    width = fields.get("pcie_width_max", NOT_QUERIED)
    for value in (generation, width):
        if isinstance(value, Unavailable):
            return value
    return f"{generation}.0 x{width}"


def _value_text(value: object) -> str:
    match value:
        case Unavailable():
            return "unknown"
        case None:
            return "not recorded"
        case bool():
            return "true" if value else "false"
    return str(value)
