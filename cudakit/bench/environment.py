"""The device, its state and the software that a result records, and reasons to doubt the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from cudakit.bench.roofline import Fields
from cudakit.gpu.api.facts import (
    NOT_QUERIED,
    DeviceFacts,
    Field,
    RunContext,
    Scalar,
    Telemetry,
    throttling_cause,
)
from cudakit.units import Unavailable, format_seconds

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
        return {
            reason: (after_ns - before_ns[reason]) / 1e9
            for reason, after_ns in self.after.slowed_ns.items()
            if after_ns > before_ns.get(reason, after_ns)
        }

    def differences_from(self, after: Environment) -> tuple[str, ...]:
        """Return the differences that make results in two environments incomparable."""
        # The versions of cudakit and Python do not change what the device does.
        names = sorted((self.versions.keys() | after.versions.keys()) - {"cudakit", "python"})
        settings: list[tuple[str, object, object]] = [
            ("GPU", self.gpu, after.gpu),
            ("simulated", self.simulated, after.simulated),
            ("SMs", self.multiprocessors, after.multiprocessors),
            *((name, self.versions.get(name), after.versions.get(name)) for name in names),
        ]
        return tuple(
            f"{setting}: {_value_text(ours)} before, {_value_text(theirs)} after"
            for setting, ours, theirs in settings
            if ours != theirs
        )


def _value_text(value: object) -> str:
    match value:
        case Unavailable():
            return "unknown"
        case None:
            return "not recorded"
        case bool():
            return "true" if value else "false"
    return str(value)


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
    nvml_device, telemetry = run_context.nvml_device, after or before
    fields: Fields = {**(nvml_device.fields if nvml_device else {}), **facts.fields}
    generation, width = (
        fields.get(name, NOT_QUERIED) for name in ("pcie_generation_max", "pcie_width_max")
    )
    pcie = next(
        (value for value in (generation, width) if isinstance(value, Unavailable)),
        f"{generation}.0 x{width}",
    )
    return Environment(
        simulated=simulated,
        gpu=_text(fields, "name"),
        uuid=facts.uuid,
        pci_bus_id=facts.pci_bus_id,
        compute_capability=_text(fields, "compute_capability"),
        multiprocessors=_integer(fields, "multiprocessor_count"),
        sm_clock_max_mhz=_number(fields, "clock_rate_khz", 1e-3),
        memory_clock_mhz=_number(fields, "memory_clock_rate_khz", 1e-3),
        memory_bus_bits=_integer(fields, "global_memory_bus_width_bits"),
        memory_bytes=_integer(fields, "usable_memory_bytes"),
        l2_bytes=_integer(fields, "l2_cache_size_bytes"),
        pcie=pcie,
        power_limit_w=_number(telemetry.fields if telemetry else {}, "power_limit_enforced_w"),
        power_limit_default_w=_number(fields, "power_limit_default_w"),
        modes={
            name: ", ".join(map(str, mode)) if isinstance(mode, tuple) else mode
            for name in _MODE_FIELDS
            if (mode := fields.get(name)) is not None
        },
        versions=dict(sorted(run_context.versions.items())),
        other_processes=run_context.other_processes,
        host=run_context.host.summary(),
        variables={
            name: run_context.variables[name]
            for name in sorted(run_context.variables)
            if name.startswith(_VARIABLE_PREFIXES)
        },
        command=run_context.command,
        before=moment(before) if before else None,
        after=moment(after) if after else None,
    )


def moment(telemetry: Telemetry) -> Moment:
    """Return the telemetry that may explain a measured time."""
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
            reason: slowed_ns
            for name, reason in _THROTTLING_COUNTERS.items()
            if isinstance(slowed_ns := fields.get(name), int)
        },
    )


def _number(fields: Fields, name: str, factor: float | None = None) -> float | Unavailable:
    value = fields.get(name, NOT_QUERIED)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if factor is None else value * factor
    return _unavailable(value)


def _integer(fields: Fields, name: str) -> int | Unavailable:
    value = fields.get(name, NOT_QUERIED)
    return value if isinstance(value, int) else _unavailable(value)


def _text(fields: Fields, name: str) -> str | Unavailable:
    value = fields.get(name, NOT_QUERIED)
    return value if isinstance(value, Unavailable) else str(value)


def _unavailable(value: Field) -> Unavailable:
    return value if isinstance(value, Unavailable) else Unavailable(f"unexpected value {value!r}")


# --- reasons to doubt the figures ---------------------------------------------------------------------

# Reasons for a lower clock that need no warning.
_NORMAL_CLOCK_REASONS = ("idle", "application clocks setting", "display clock setting")
# Environment variables that change the speed of CUDA, and their effect.
_SLOWING_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "every launch waits for its kernel",
    "CUDA_INJECTION64_PATH": "a profiler or checker runs in the process",
    "NVIDIA_TF32_OVERRIDE": "it overrides the use of tf32",
}


def environment_warnings(environments: Sequence[Environment]) -> tuple[str, ...]:
    """Return each warning of several environments once; throttled time is summed."""
    warnings = [*chain.from_iterable(map(_lasting_warnings, environments))]
    slowed_s: Counter[str] = Counter()
    for environment in environments:
        slowed_s.update(environment.throttled_seconds)
    for reason, seconds in slowed_s.items():
        warnings.append(f"the clock was throttled for {format_seconds(seconds)}: {reason}")
    if not slowed_s:  # without counters, the last reasons for a low clock
        for environment in environments:
            last = environment.after or environment.before
            if last and isinstance(last.clock_reasons, tuple) and not last.slowed_ns:
                reasons = set(last.clock_reasons) - set(_NORMAL_CLOCK_REASONS)
                warnings += sorted(
                    {f"the clock was throttled: {throttling_cause(reason)}" for reason in reasons}
                )
    return tuple(dict.fromkeys(warnings))


def _lasting_warnings(environment: Environment) -> Iterator[str]:
    """Yield warnings about conditions that last for the whole run."""
    others = environment.other_processes
    if isinstance(others, int) and others:
        process_text = "process uses" if others == 1 else "processes use"
        yield f"{others} other {process_text} the GPU, so rates may be too low"
    limit_w, default_w = environment.power_limit_w, environment.power_limit_default_w
    if (
        not isinstance(limit_w, Unavailable)
        and not isinstance(default_w, Unavailable)
        and limit_w < default_w
    ):
        yield f"the power limit is {limit_w:.0f} W instead of the default {default_w:.0f} W"
    if environment.modes.get("mps_enabled") is True:
        yield "MPS is on, so other processes may use the GPU unnoticed"
    for name, effect in _SLOWING_VARIABLES.items():
        if environment.variables.get(name, "0") not in ("", "0"):
            yield f"{name} is set: {effect}"


def likely_causes(environments: Sequence[Environment], fields: Fields) -> tuple[str, ...]:
    """Return each likely cause of bad figures once.

    ``environments`` belong to the cases with bad figures; ``fields`` are facts and telemetry of NVML.
    """
    causes = [*environment_warnings(environments)]
    width, full_width = fields.get("pcie_width"), fields.get("pcie_width_max")
    if isinstance(width, int) and isinstance(full_width, int) and 0 < width < full_width:
        causes.append(f"PCIe runs with {width} of {full_width} lanes")
    slot, gpu = fields.get("pcie_generation_max"), fields.get("pcie_generation_device_max")
    if isinstance(slot, int) and isinstance(gpu, int) and 0 < slot < gpu:
        causes.append(f"the slot supports PCIe {slot}.0, and the GPU PCIe {gpu}.0")
    return tuple(dict.fromkeys(causes))
