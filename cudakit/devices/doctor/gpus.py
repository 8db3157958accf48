"""The state of each GPU, and rules that check the state of single GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from cudakit.devices.doctor.check import Finding, NotCheckable, Status, ok
from cudakit.devices.doctor.driver import require_nvml
from cudakit.devices.query import match_devices
from cudakit.gpu.api.facts import DeviceFacts, Field, RunContext, Telemetry
from cudakit.units import Unavailable


@dataclass(frozen=True, slots=True)
class GpuState:
    """The facts and the telemetry of one GPU that NVML reports."""

    facts: DeviceFacts
    fields: Mapping[str, Field]  # values of NVML, or else those of CUDA

    @property
    def label(self) -> str:
        return f"GPU {self.facts.index}"

    def number_field(self, name: str) -> float | None:
        value = self.fields.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def text_field(self, name: str) -> str | None:
        value = self.fields.get(name)
        return value if isinstance(value, str) else None

    def flag_field(self, name: str) -> bool | None:
        value = self.fields.get(name)
        return value if isinstance(value, bool) else None

    def text_list_field(self, name: str) -> tuple[str, ...]:
        value = self.fields.get(name)
        return tuple(map(str, value)) if isinstance(value, tuple) else ()


def gpu_states(context: RunContext) -> tuple[GpuState, ...]:
    """Return the GPUs without their MIG instances. Raises NotCheckable if NVML reports none."""
    matched = [
        device for device in match_devices(require_nvml(context), context.cuda) if device.nvml
    ]
    gpus = []
    for device, telemetry in zip_longest(matched, context.telemetry):
        if device.nvml is not None and device.nvml.parent is None:
            fields = telemetry.fields if isinstance(telemetry, Telemetry) else {}
            gpus.append(GpuState(device.nvml, {**device.fields, **fields}))
    if not gpus:
        raise NotCheckable("NVML reports no GPU (CK007)")
    return tuple(gpus)


def reporting_gpus(
    context: RunContext, field_names: Iterable[str], *, otherwise: str
) -> list[GpuState]:
    """Return the GPUs that report one of the fields. Raises NotCheckable(otherwise) without any."""
    gpus = [
        gpu
        for gpu in gpu_states(context)
        if any(
            not isinstance(gpu.fields.get(name), (Unavailable, type(None))) for name in field_names
        )
    ]
    if not gpus:
        raise NotCheckable(otherwise)
    return gpus


def evidence_of(
    gpus: Iterable[GpuState], describe: Callable[[GpuState], str | None]
) -> dict[str, str]:
    """Return the description of each GPU by the GPU's label; GPUs without a description are left out."""
    descriptions = {gpu.label: describe(gpu) for gpu in gpus}
    return {label: description for label, description in descriptions.items() if description}


def names_of(gpus: Sequence[GpuState]) -> str:
    """Return the names of GPUs for a sentence: "GPU 0", "GPUs 0, 2 and 3"."""
    indices = [str(gpu.facts.index) for gpu in gpus]
    if len(indices) == 1:
        return f"GPU {indices[0]}"
    return f"GPUs {', '.join(indices[:-1])} and {indices[-1]}"


@dataclass(frozen=True, slots=True)
class GpuRule:
    """A condition, and the finding about all GPUs that fulfill the condition.

    Message and fix have placeholders: {gpus} stands for the names of the GPUs that meet the condition,
    {indices} for their NVML indices, {index} for the index of the first of these GPUs, {detail} for the
    measured value of the first GPU.
    """

    status: Status
    is_met: Callable[[GpuState], object]  # function that returns whether a GPU meets the condition
    message: str
    fix: tuple[str, ...]
    describe: Callable[[GpuState], str | None]  # function that returns the evidence about one GPU
    detail_of: Callable[[GpuState], object] = lambda gpu: ""  # noqa: ARG005

    def findings(self, gpus: Sequence[GpuState]) -> Iterator[Finding]:
        """Yield the finding if at least one GPU fulfills the condition."""
        affected_gpus = [gpu for gpu in gpus if self.is_met(gpu)]
        if affected_gpus:
            placeholders = {
                "gpus": names_of(affected_gpus),
                "indices": ",".join(str(gpu.facts.index) for gpu in affected_gpus),
                "index": affected_gpus[0].facts.index,
                "detail": self.detail_of(affected_gpus[0]),
            }
            yield Finding(
                self.status,
                self.message.format(**placeholders),
                evidence_of(affected_gpus, self.describe),
                tuple(remedy.format(**placeholders) for remedy in self.fix),
            )


def check_gpus(
    gpus: Sequence[GpuState],
    rules: Iterable[GpuRule],
    summary_if_ok: str,
    describe: Callable[[GpuState], str | None],
) -> Iterator[Finding]:
    """Yield the findings of the rules, then the one that holds if there are none."""
    for rule in rules:
        yield from rule.findings(gpus)
    yield ok(summary_if_ok, evidence_of(gpus, describe))


# --- Checks of the health of GPUs (CK027 to CK032), as rules about single GPUs ---------------------

_ECC_VOLATILE = (
    "ecc_sram_uncorrected_volatile",
    "ecc_sram_parity_volatile",
    "ecc_dram_uncorrected_volatile",
)
_ECC_AGGREGATE = (
    "ecc_sram_uncorrected_aggregate",
    "ecc_sram_parity_aggregate",
    "ecc_dram_uncorrected_aggregate",
)


def _sum_of_fields(gpu: GpuState, field_names: tuple[str, ...]) -> int:
    return int(sum(gpu.number_field(name) or 0 for name in field_names))


def _ecc_counts(gpu: GpuState) -> str:
    volatile_errors = _sum_of_fields(gpu, _ECC_VOLATILE)
    aggregate_errors = _sum_of_fields(gpu, _ECC_AGGREGATE)
    return f"{volatile_errors} since driver load, {aggregate_errors} in total"


ECC_RULES = (
    GpuRule(
        Status.FAIL,
        lambda gpu: gpu.flag_field("ecc_sram_threshold_exceeded"),
        "{gpus}: the number of SRAM errors exceeds the limit for replacement",
        ("run the vendor's field diagnostic and replace the GPU",),
        _ecc_counts,
    ),
    GpuRule(
        Status.FAIL,
        lambda gpu: _sum_of_fields(gpu, _ECC_VOLATILE),
        "{gpus}: uncorrectable memory errors since the driver was loaded",
        ("end all processes on the GPU, then: sudo nvidia-smi --gpu-reset -i {indices}",),
        _ecc_counts,
    ),
    GpuRule(
        Status.WARN,
        lambda gpu: _sum_of_fields(gpu, _ECC_AGGREGATE) and not _sum_of_fields(gpu, _ECC_VOLATILE),
        "{gpus}: uncorrectable memory errors before the driver was last loaded",
        ("check whether the count grows: nvidia-smi -q -d ECC",),
        _ecc_counts,
    ),
)


def memory_errors(context: RunContext) -> Iterator[Finding]:
    """ECC detects memory errors; an error that it cannot correct ends the affected programs.

    Volatile counters start when the driver is loaded, aggregate counters count over the life of the GPU.
    An uncorrectable error since driver load means that programs or results were lost; after a DRAM error
    the GPU remaps the memory row (CK028). GeForce GPUs have no ECC, or ECC is off.
    """
    gpus = reporting_gpus(
        context,
        (*_ECC_VOLATILE, *_ECC_AGGREGATE),
        otherwise="no GPU reports counts of memory errors, for example because ECC is off",
    )
    return check_gpus(gpus, ECC_RULES, "no uncorrectable memory errors", _ecc_counts)


def _repair_counts(gpu: GpuState) -> str | None:
    for prefix, kinds, unit in (
        ("remapped_rows", ("correctable", "uncorrectable"), "rows remapped"),
        ("retired_pages", ("single_bit", "double_bit"), "pages retired"),
    ):
        counts = [gpu.number_field(f"{prefix}_{kind}") for kind in kinds]
        if None not in counts:
            return f"{sum(int(count or 0) for count in counts)} {unit}"
    return None


def _recovery_action(gpu: GpuState) -> str | None:
    return gpu.text_field("recovery_action")


_RESET_FIX = (
    "end all processes on the GPU, then: sudo nvidia-smi --gpu-reset -i {indices} (or reboot)"
)
_PENDING_REPAIRS = ("remapped_rows_pending", "retired_pages_pending", "repair_channel_pending")
_REPAIR_FIELDS = (
    *_PENDING_REPAIRS,
    "remapped_rows_failed",
    "unrepairable_memory",
    "recovery_action",
)
REPAIR_RULES = (
    GpuRule(
        Status.FAIL,
        lambda gpu: gpu.flag_field("remapped_rows_failed") or gpu.flag_field("unrepairable_memory"),
        "{gpus}: defective memory could not be replaced: no spare rows are left",
        ("replace the GPU",),
        _repair_counts,
    ),
    GpuRule(
        Status.WARN,
        lambda gpu: any(gpu.flag_field(name) for name in _PENDING_REPAIRS),
        "{gpus}: defective memory is still in use until the next reset",
        (_RESET_FIX,),
        _repair_counts,
    ),
    GpuRule(
        Status.FAIL,
        lambda gpu: _recovery_action(gpu) not in (None, "none"),
        "{gpus}: the driver requests a recovery action: {detail}",
        (_RESET_FIX,),
        _recovery_action,
        detail_of=_recovery_action,
    ),
)


def memory_repairs(context: RunContext) -> Iterator[Finding]:
    """GPUs replace defective memory with spare rows (Ampere and newer) or retire pages (older GPUs).

    A pending replacement takes effect at the next reset; until then the defective memory stays in use. A
    failed replacement means that no spare rows are left: the GPU must be replaced. The driver may also
    request an action (recovery action). Source: NVIDIA GPU Memory Error Management.
    """
    gpus = reporting_gpus(
        context, _REPAIR_FIELDS, otherwise="no GPU reports the state of memory repairs"
    )
    return check_gpus(gpus, REPAIR_RULES, "no memory repair is pending", _repair_counts)


# --- speed -----------------------------------------------------------------------------------------

# Minimum utilization at which the PCIe link is not idle.
_MIN_BUSY_PERCENT = 10
# Clock event reasons that are a problem. The power limit ("software power cap") is not among these reasons,
# because it is normal under load.
_THROTTLING_REASONS = (
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake slowdown",
)


def _is_below_maximum(gpu: GpuState, name: str) -> bool:
    current, maximum = gpu.number_field(name), gpu.number_field(f"{name}_max")
    return current is not None and maximum is not None and 0 < current < maximum


def _is_busy(gpu: GpuState) -> bool:
    return (gpu.number_field("utilization_gpu_percent") or 0) >= _MIN_BUSY_PERCENT


def _link_text(gpu: GpuState) -> str:
    def link(suffix: str) -> str:
        numbers = (
            gpu.number_field(f"pcie_generation{suffix}"),
            gpu.number_field(f"pcie_width{suffix}"),
        )
        generation, width = ("?" if number is None else f"{number:g}" for number in numbers)
        return f"generation {generation} x{width}"

    return f"{link('')}, maximum {link('_max')}, {'busy' if _is_busy(gpu) else 'idle'}"


PCIE_RULES = (
    GpuRule(
        Status.WARN,
        lambda gpu: _is_below_maximum(gpu, "pcie_width"),
        "{gpus}: the PCIe link has fewer lanes than GPU and slot support",
        ("reseat the card; check the riser and the BIOS setting for bifurcation",),
        _link_text,
    ),
    GpuRule(
        Status.WARN,
        lambda gpu: _is_below_maximum(gpu, "pcie_generation") and _is_busy(gpu),
        "{gpus}: the PCIe link runs below its maximum generation under load",
        ("check the riser, the BIOS link speed, and replays: nvidia-smi -q -d PCIE",),
        _link_text,
    ),
)


def pcie_links(context: RunContext) -> Iterator[Finding]:
    """Copies between host and GPU are slower if the PCIe link has fewer lanes or a lower generation.

    An idle link lowers its generation to save power, so the generation is checked only under load. The
    number of lanes does not change with load; fewer lanes than GPU and slot support indicate a badly seated
    card, a riser or a BIOS setting.
    """
    gpus = reporting_gpus(
        context, ("pcie_width", "pcie_generation"), otherwise="no GPU reports a PCIe link"
    )
    has_idle_link = any(
        _is_below_maximum(gpu, "pcie_generation") and not _is_busy(gpu) for gpu in gpus
    )
    idle_note = " (idle links run slower, which is normal)" if has_idle_link else ""
    return check_gpus(gpus, PCIE_RULES, f"PCIe links have all lanes{idle_note}", _link_text)


def _clock_reasons(gpu: GpuState) -> str:
    return ", ".join(gpu.text_list_field("clock_event_reasons")) or "none"


def _throttling_reason(gpu: GpuState) -> str:
    reasons = gpu.text_list_field("clock_event_reasons")
    return next((reason for reason in reasons if reason in _THROTTLING_REASONS), "")


THROTTLING_RULE = GpuRule(
    Status.WARN,
    _throttling_reason,
    "{gpus}: throttled now ({detail})",
    ("check fans, airflow and power supply: nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE",),
    lambda gpu: f"{_clock_reasons(gpu)}, {gpu.number_field('temperature_gpu_c') or 0:g} °C",
    detail_of=_throttling_reason,
)


def throttling(context: RunContext) -> Iterator[Finding]:
    """A GPU that is too hot, or gets too little power, lowers its clocks (throttling).

    The check sees the current state only: run it while the GPU is under load. Throttling by the power limit,
    which NVML calls "software power cap", is normal under full load and is not reported; CK031 checks the
    limit itself. "Hardware power brake slowdown" is NVML's name of a slowdown that the power supply requests.
    """
    gpus = reporting_gpus(
        context,
        ("clock_event_reasons",),
        otherwise="no GPU reports whether it is throttled",
    )
    summary_if_ok = "no GPU is throttled now, except by its power limit"
    return check_gpus(gpus, [THROTTLING_RULE], summary_if_ok, _clock_reasons)


def _power_limit(gpu: GpuState) -> float:
    return gpu.number_field("power_limit_enforced_w") or gpu.number_field("power_limit_w") or 0


def _power_text(gpu: GpuState) -> str:
    default_w = gpu.number_field("power_limit_default_w")
    return (
        f"{_power_limit(gpu):.0f} W, default {'?' if default_w is None else f'{default_w:.0f} W'}"
    )


POWER_RULE = GpuRule(
    Status.WARN,
    # A difference below 1 W is ignored, because NVML rounds the limits.
    lambda gpu: _power_limit(gpu) + 1 < (gpu.number_field("power_limit_default_w") or 0),
    "{gpus}: the power limit is below its default",
    ("sudo nvidia-smi -i {index} -pl {detail:.0f}",),
    _power_text,
    detail_of=lambda gpu: gpu.number_field("power_limit_default_w") or 0,
)


def power_limits(context: RunContext) -> Iterator[Finding]:
    """A power limit below the default lowers the clocks under full load.

    Such a limit was set with nvidia-smi -pl or by the machine's power management, and is reset at reboot
    unless a service sets it again.
    """
    gpus = reporting_gpus(
        context,
        ("power_limit_enforced_w", "power_limit_w"),
        otherwise="no GPU reports a power limit",
    )
    summary_if_ok = "all power limits are at or above their default"
    return check_gpus(gpus, [POWER_RULE], summary_if_ok, _power_text)


PERSISTENCE_RULE = GpuRule(
    Status.WARN,
    lambda gpu: not gpu.flag_field("persistence_mode") and not gpu.flag_field("display_active"),
    "{gpus}: persistence mode is off, so the first program waits for the GPU to initialize",
    (
        "sudo systemctl enable --now nvidia-persistenced",
        "or until reboot: sudo nvidia-smi -i {index} -pm 1",
    ),
    lambda gpu: "off",  # noqa: ARG005
)


def persistence(context: RunContext) -> Iterator[Finding]:
    """Without persistence mode the driver shuts down an unused GPU and initializes it again at the next use.

    Initialization takes a second or more and resets settings such as the power limit. A display, or any
    process that keeps the GPU open, has the same effect as persistence mode. nvidia-persistenced is
    NVIDIA's recommended way to enable persistence mode.
    """
    gpus = reporting_gpus(
        context, ("persistence_mode",), otherwise="no GPU reports its persistence mode"
    )
    yield from PERSISTENCE_RULE.findings(gpus)
    yield ok("persistence mode, or a display, keeps every GPU initialized")
