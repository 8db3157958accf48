"""Checks of the health of GPUs (CK027 to CK032): rules about single GPUs."""

from __future__ import annotations

from cudakit.core.devices.diagnose.check import Finding, Status
from cudakit.core.devices.diagnose.gpus import GpuRule, GpuState, check_gpus, gpu_states
from cudakit.gpu.api.run_context import RunContext

# --- memory ----------------------------------------------------------------------------------------

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


def _total(gpu: GpuState, names: tuple[str, ...]) -> int:
    return int(sum(gpu.number(name) or 0 for name in names))


def _ecc_counts(gpu: GpuState) -> str:
    volatile, aggregate = _total(gpu, _ECC_VOLATILE), _total(gpu, _ECC_AGGREGATE)
    return f"{volatile} since the driver was loaded, {aggregate} ever"


ECC_RULES = (
    GpuRule(
        Status.FAIL,
        lambda gpu: gpu.flag("ecc_sram_threshold_exceeded"),
        "SRAM errors of {gpus} exceed the limit for replacement",
        ("run the vendor's field diagnostic and have it replaced",),
        _ecc_counts,
    ),
    GpuRule(
        Status.FAIL,
        lambda gpu: _total(gpu, _ECC_VOLATILE),
        "{gpus} has had memory errors that could not be corrected",
        ("end what runs on it, then: sudo nvidia-smi --gpu-reset -i {indices}",),
        _ecc_counts,
    ),
    GpuRule(
        Status.WARN,
        lambda gpu: _total(gpu, _ECC_AGGREGATE) and not _total(gpu, _ECC_VOLATILE),
        "{gpus} had uncorrected memory errors earlier in its life",
        ("watch whether the count grows: nvidia-smi -q -d ECC",),
        _ecc_counts,
    ),
)


def memory_errors(c: RunContext) -> Finding:
    """ECC finds errors of memory; those that it cannot correct end the programs they hit.

    Volatile counters begin when the driver is loaded, aggregate ones with the life of the GPU. An
    uncorrected error since the driver was loaded means results or programs were lost; DRAM errors are
    answered by remapping the row (CK028). GeForce cards have no ECC of their memory, or have it off.
    """
    gpus = [gpu for gpu in gpu_states(c) if gpu.has(*_ECC_VOLATILE, *_ECC_AGGREGATE)]
    return check_gpus(
        gpus,
        ECC_RULES,
        "no uncorrected memory error",
        _ecc_counts,
        without="no GPU counts memory errors (it has no ECC, or has it off)",
    )


def _repairs(gpu: GpuState) -> str | None:
    remapped = gpu.number("remapped_rows_correctable"), gpu.number("remapped_rows_uncorrectable")
    if None not in remapped:
        return f"{sum(int(rows or 0) for rows in remapped)} rows remapped"
    retired = gpu.number("retired_pages_single_bit"), gpu.number("retired_pages_double_bit")
    return None if None in retired else f"{sum(int(pages or 0) for pages in retired)} pages retired"


def _recovery_action(gpu: GpuState) -> str | None:
    return gpu.text("recovery_action")


_RESET = "end what runs on it, then: sudo nvidia-smi --gpu-reset -i {indices} (or reboot)"
_PENDING_REPAIRS = ("remapped_rows_pending", "retired_pages_pending", "repair_channel_pending")
REPAIR_RULES = (
    GpuRule(
        Status.FAIL,
        lambda gpu: gpu.flag("remapped_rows_failed") or gpu.flag("unrepairable_memory"),
        "{gpus} has bad memory and no spare rows left for it",
        ("have it replaced",),
        _repairs,
    ),
    GpuRule(
        Status.WARN,
        lambda gpu: any(gpu.flag(name) for name in _PENDING_REPAIRS),
        "bad memory of {gpus} is replaced at the next reset",
        (_RESET,),
        _repairs,
    ),
    GpuRule(
        Status.FAIL,
        lambda gpu: _recovery_action(gpu) not in (None, "none"),
        "the driver asks for recovery: {detail}",
        (_RESET,),
        _recovery_action,
        detail=_recovery_action,
    ),
)


def memory_repairs(c: RunContext) -> Finding:
    """GPUs replace bad memory by spare rows (from Ampere on) or leave pages out (before).

    A replacement that is pending takes effect with the next reset; until then the bad memory stays in
    use. One that failed means that the spares are used up: the GPU must be replaced. The driver may also
    say outright what it needs (recovery action). NVIDIA GPU Memory Error Management.
    """
    return check_gpus(gpu_states(c), REPAIR_RULES, "no memory waits for repair", _repairs)


# --- speed -----------------------------------------------------------------------------------------

# Above this utilization a link has left its idle state.
_BUSY_PERCENT = 10
# Reasons that slow work down. A power cap under load is normal operation.
_THROTTLES = (
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake slowdown",
)


def _is_below_maximum(gpu: GpuState, name: str) -> bool:
    now, most = gpu.number(name), gpu.number(f"{name}_max")
    return now is not None and most is not None and 0 < now < most


def _is_busy(gpu: GpuState) -> bool:
    return (gpu.number("utilization_gpu_percent") or 0) >= _BUSY_PERCENT


def _link(gpu: GpuState) -> str:
    def text(name: str) -> str:
        number = gpu.number(name)
        return "?" if number is None else f"{number:g}"

    now = f"generation {text('pcie_generation')} x{text('pcie_width')}"
    most = f"{text('pcie_generation_max')} x{text('pcie_width_max')}"
    return f"{now} of {most}{', busy' if _is_busy(gpu) else ', idle'}"


PCIE_RULES = (
    GpuRule(
        Status.WARN,
        lambda gpu: _is_below_maximum(gpu, "pcie_width"),
        "the PCIe link of {gpus} is narrower than card and slot allow",
        ("reseat the card, and look at riser and BIOS (bifurcation)",),
        _link,
    ),
    GpuRule(
        Status.WARN,
        lambda gpu: _is_below_maximum(gpu, "pcie_generation") and _is_busy(gpu),
        "the PCIe link of {gpus} is slow under load",
        ("look at riser and BIOS (link speed), and for replays: nvidia-smi -q -d PCIE",),
        _link,
    ),
)


def pcie_links(c: RunContext) -> Finding:
    """A GPU in a slot, or behind a riser, with fewer lanes copies that much slower.

    An idle link slows down to save power, which is normal: the generation is judged only while the GPU
    works. The width does not change with load; fewer lanes than GPU and slot both have point to a badly
    seated card, a riser or a setting of the BIOS.
    """
    gpus = [gpu for gpu in gpu_states(c) if gpu.has("pcie_width", "pcie_generation")]
    idle = any(_is_below_maximum(gpu, "pcie_generation") and not _is_busy(gpu) for gpu in gpus)
    well = f"PCIe links have all their lanes{'; slower while idle, as is normal' if idle else ''}"
    return check_gpus(gpus, PCIE_RULES, well, _link, without="no GPU tells of a PCIe link")


def _clock_reasons(gpu: GpuState) -> str:
    return ", ".join(gpu.words("clock_event_reasons") or ()) or "none"


def _throttle(gpu: GpuState) -> str:
    """Return the first reason that slows work down, "" without one."""
    reasons = gpu.words("clock_event_reasons") or ()
    return next((reason for reason in reasons if reason in _THROTTLES), "")


THROTTLING_RULE = GpuRule(
    Status.WARN,
    _throttle,
    "{gpus} is slowed down now: {detail}",
    ("look at fans, airflow and power supply: nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE",),
    lambda gpu: f"{_clock_reasons(gpu)}, {gpu.number('temperature_gpu_c') or 0:g} C",
    detail=_throttle,
)


def throttling(c: RunContext) -> Finding:
    """Heat or a lack of power makes a GPU slow down; the driver says which.

    Seen at this moment only: run it under load. A software power cap is not counted, for it is how a
    GPU under full load is meant to run; CK031 looks at the limit itself. Power brake means that the
    power supply asked for less.
    """
    gpus = [gpu for gpu in gpu_states(c) if gpu.words("clock_event_reasons") is not None]
    well = "no GPU is slowed down by heat or lack of power now"
    return check_gpus(gpus, [THROTTLING_RULE], well, _clock_reasons)


def _power_limit(gpu: GpuState) -> float:
    return gpu.number("power_limit_enforced_w") or gpu.number("power_limit_w") or 0


def _power(gpu: GpuState) -> str:
    default = gpu.number("power_limit_default_w")
    return f"{_power_limit(gpu):.0f} W of {'?' if default is None else f'{default:.0f} W'}"


POWER_RULE = GpuRule(
    Status.WARN,
    # NVML rounds: a difference below 1 W is none.
    lambda gpu: _power_limit(gpu) + 1 < (gpu.number("power_limit_default_w") or 0),
    "the power limit of {gpus} is below its default",
    ("sudo nvidia-smi -i {index} -pl {detail:.0f}",),
    _power,
    detail=lambda gpu: gpu.number("power_limit_default_w") or 0,
)


def power_limits(c: RunContext) -> Finding:
    """A power limit below the default keeps clocks down under full load.

    Somebody set it (nvidia-smi -pl), or the machine's power management did. It is lost at reboot,
    unless a service sets it again.
    """
    gpus = [gpu for gpu in gpu_states(c) if gpu.has("power_limit_enforced_w", "power_limit_w")]
    return check_gpus(
        gpus,
        [POWER_RULE],
        "no power limit is below its default",
        _power,
        without="no GPU tells its power limit",
    )


PERSISTENCE_RULE = GpuRule(
    Status.WARN,
    lambda gpu: not gpu.flag("persistence_mode") and not gpu.flag("display_active"),
    "persistence mode of {gpus} is off: each first program waits for the GPU to start",
    (
        "sudo systemctl enable --now nvidia-persistenced",
        "or until reboot: sudo nvidia-smi -i {index} -pm 1",
    ),
    lambda gpu: "off",  # noqa: ARG005
)


def persistence(c: RunContext) -> Finding:
    """Without persistence mode the driver leaves a GPU when nobody uses it, and starts it anew each time.

    That takes a second or more for every first program, and forgets settings such as the power limit. A
    display, or any process that keeps the GPU open, has the same effect as the mode. nvidia-persistenced
    is the way to have it on.
    """
    gpus = [gpu for gpu in gpu_states(c) if gpu.flag("persistence_mode") is not None]
    return check_gpus(
        gpus,
        [PERSISTENCE_RULE],
        "the driver stays on every GPU",
        lambda gpu: None,  # noqa: ARG005
        without="no GPU tells of persistence mode",
    )
