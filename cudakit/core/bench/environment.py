"""The device, its state and the software that a result records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cudakit.gpu.api.facts import NOT_QUERIED, DeviceFacts, Field, Scalar, Telemetry
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

_MODES = ("mig_mode", "mps_enabled", "ecc_enabled", "persistence_mode", "compute_mode")
_SLOWED = {
    "slowed_by_power_cap_ns": "power cap",
    "slowed_by_sync_boost_ns": "sync boost",
    "slowed_by_software_thermal_ns": "heat, by software",
    "slowed_by_hardware_thermal_ns": "heat, by hardware",
    "slowed_by_power_brake_ns": "power brake",
}
# Prefixes of environment variables that affect CUDA and its libraries.
_VARIABLES = ("CUDA_", "CUBLAS", "NCCL_", "NVIDIA_", "PYTORCH_", "TORCH_", "CUPY_", "OMP_NUM_")


@dataclass(frozen=True, slots=True)
class Moment:
    """The telemetry of a device at one time."""

    time_ns: int  # since 1970
    sm_clock_mhz: float | Unavailable  # from NVML; the clock that kernels measure is more accurate
    memory_clock_mhz: float | Unavailable
    temperature_c: float | Unavailable  # of the GPU
    memory_temperature_c: float | Unavailable
    power_w: float | Unavailable  # mean of the last second
    energy_j: float | Unavailable  # since the driver was loaded
    clock_reasons: tuple[str, ...] | Unavailable  # reasons for the current clock
    slowed_ns: Mapping[str, int] = field(
        default_factory=dict
    )  # throttled time since the driver was loaded


@dataclass(frozen=True, slots=True)
class Environment:
    """The conditions of a measurement besides the options."""

    simulated: bool
    gpu: str | Unavailable  # name of the model
    uuid: str | Unavailable
    pci_bus_id: str | Unavailable
    compute_capability: str | Unavailable
    multiprocessors: int | Unavailable  # SMs
    sm_clock_max_mhz: float | Unavailable
    memory_clock_mhz: float | Unavailable  # maximum
    memory_bus_bits: int | Unavailable
    memory_bytes: int | Unavailable  # total that CUDA reports
    l2_bytes: int | Unavailable
    pcie: str | Unavailable  # "5.0 x16": the highest that GPU and slot support
    power_limit_w: float | Unavailable  # enforced
    power_limit_default_w: float | Unavailable
    modes: Mapping[str, Scalar | Unavailable]  # MIG, MPS, ECC, persistence, compute mode
    versions: Mapping[str, str]  # driver, CUDA, libraries, cudakit, Python
    other_processes: int | Unavailable = NOT_QUERIED  # on the GPU
    host: Mapping[str, str] = field(default_factory=dict)  # CPU, NUMA node, container
    variables: Mapping[str, str] = field(default_factory=dict)  # of the process environment
    command: tuple[str, ...] = ()  # command line
    before: Moment | None = None  # before the first sample
    after: Moment | None = None  # after the last sample

    @property
    def slowed(self) -> Mapping[str, float]:
        """Throttled time in seconds between ``before`` and ``after``, by reason."""
        if self.before is None or self.after is None:
            return {}
        earlier = self.before.slowed_ns
        spans = {
            why: (ns - earlier[why]) / 1e9
            for why, ns in self.after.slowed_ns.items()
            if why in earlier
        }
        return {why: seconds for why, seconds in spans.items() if seconds > 0}

    def differences_from(self, other: Environment) -> tuple[str, ...]:
        """Return the differences that make results in two environments incomparable."""
        # The versions of cudakit and Python do not change what the device does.
        names = sorted((self.versions.keys() | other.versions.keys()) - {"cudakit", "python"})
        pairs: list[tuple[str, object, object]] = [
            ("GPU", self.gpu, other.gpu),
            ("simulated", self.simulated, other.simulated),
            ("SMs", self.multiprocessors, other.multiprocessors),
            *((name, self.versions.get(name), other.versions.get(name)) for name in names),
        ]
        return tuple(
            f"{setting}: {_shown(here)} before, {_shown(there)} after"
            for setting, here, there in pairs
            if here != there
        )


def environment(
    facts: DeviceFacts,
    run_context: RunContext,
    *,
    simulated: bool,
    before: Telemetry | None = None,
    after: Telemetry | None = None,
) -> Environment:
    """Return the Environment of a device; ``facts`` are CUDA's facts of it.

    Only those environment variables are kept that affect CUDA.
    """
    device = run_context.nvml_device
    merged: dict[str, Field] = {**(device.fields if device else {}), **facts.fields}
    telemetry = after or before
    limits = telemetry.fields if telemetry else {}
    return Environment(
        simulated=simulated,
        gpu=_text(merged, "name"),
        uuid=facts.uuid,
        pci_bus_id=facts.pci_bus_id,
        compute_capability=_text(merged, "compute_capability"),
        multiprocessors=_integer(merged, "multiprocessor_count"),
        sm_clock_max_mhz=_number(merged, "clock_rate_khz", 1e-3),
        memory_clock_mhz=_number(merged, "memory_clock_rate_khz", 1e-3),
        memory_bus_bits=_integer(merged, "global_memory_bus_width_bits"),
        memory_bytes=_integer(merged, "usable_memory_bytes"),
        l2_bytes=_integer(merged, "l2_cache_size_bytes"),
        pcie=_pcie(merged),
        power_limit_w=_number(limits, "power_limit_enforced_w"),
        power_limit_default_w=_number(merged, "power_limit_default_w"),
        modes={name: _mode(merged[name]) for name in _MODES if name in merged},
        versions=dict(sorted(run_context.versions.items())),
        other_processes=run_context.other_processes,
        host=run_context.host.summary(),
        variables=relevant_variables(run_context.variables),
        command=run_context.command,
        before=moment(before) if before else None,
        after=moment(after) if after else None,
    )


def moment(telemetry: Telemetry) -> Moment:
    """Return the part of the telemetry that affects measurements."""
    fields = telemetry.fields
    reasons = fields.get("clock_event_reasons", NOT_QUERIED)
    return Moment(
        time_ns=telemetry.time_ns,
        sm_clock_mhz=_number(fields, "clock_sm_mhz"),
        memory_clock_mhz=_number(fields, "clock_memory_mhz"),
        temperature_c=_number(fields, "temperature_gpu_c"),
        memory_temperature_c=_number(fields, "temperature_memory_c"),
        power_w=_number(fields, "power_draw_w"),
        energy_j=_number(fields, "energy_j"),
        clock_reasons=tuple(map(str, reasons))
        if isinstance(reasons, tuple)
        else _unavailable(reasons),
        slowed_ns={
            why: ns for name, why in _SLOWED.items() if isinstance(ns := fields.get(name), int)
        },
    )


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that affect CUDA and its libraries, sorted by name."""
    return {name: variables[name] for name in sorted(variables) if name.startswith(_VARIABLES)}


def _number(
    fields: Mapping[str, Field], name: str, factor: float | None = None
) -> float | Unavailable:
    value = fields.get(name, NOT_QUERIED)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if factor is None else value * factor
    return _unavailable(value)


def _integer(fields: Mapping[str, Field], name: str) -> int | Unavailable:
    value = fields.get(name, NOT_QUERIED)
    return value if isinstance(value, int) else _unavailable(value)


def _text(fields: Mapping[str, Field], name: str) -> str | Unavailable:
    value = fields.get(name, NOT_QUERIED)
    return value if isinstance(value, Unavailable) else str(value)


def _mode(value: Field) -> Scalar | Unavailable:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else value


def _unavailable(value: Field) -> Unavailable:
    return value if isinstance(value, Unavailable) else Unavailable(f"unexpected value {value!r}")


def _pcie(fields: Mapping[str, Field]) -> str | Unavailable:
    generation = fields.get("pcie_generation_max", NOT_QUERIED)
    width = fields.get("pcie_width_max", NOT_QUERIED)
    for value in (generation, width):
        if isinstance(value, Unavailable):
            return value
    return f"{generation}.0 x{width}"


def _shown(value: object) -> str:
    match value:
        case Unavailable():
            return "unknown"
        case None:
            return "not recorded"
        case bool():
            return "true" if value else "false"
    return str(value)
