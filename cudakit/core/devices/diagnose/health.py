"""Is the hardware whole, and as fast as it could be?"""

from __future__ import annotations

from cudakit.core.devices.circumstances import Circumstances
from cudakit.core.devices.diagnose.check import Finding, fail, ok, together, warn
from cudakit.core.devices.diagnose.gpus import SeenGpu, each, named, seen_gpus

_ECC_NOW = (
    "ecc_sram_uncorrected_volatile",
    "ecc_sram_parity_volatile",
    "ecc_dram_uncorrected_volatile",
)
_ECC_EVER = (
    "ecc_sram_uncorrected_aggregate",
    "ecc_sram_parity_aggregate",
    "ecc_dram_uncorrected_aggregate",
)
# Above this a link has left its idle state.
_BUSY_PERCENT = 10
# Reasons that take speed away from work. A power cap under load is how a GPU is meant to run.
_THROTTLES = (
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake slowdown",
)


def memory_errors(c: Circumstances) -> Finding:
    """ECC finds errors of memory; those that it cannot correct end the programs they hit.

    Volatile counters begin when the driver is loaded, aggregate ones with the life of the GPU. An
    uncorrected error since the driver was loaded means results or programs were lost; DRAM errors are
    answered by remapping the row (CK028). GeForce cards have no ECC of their memory, or have it off.
    """
    gpus = [gpu for gpu in seen_gpus(c) if gpu.knows(*_ECC_NOW, *_ECC_EVER)]
    now = [gpu for gpu in gpus if _sum(gpu, _ECC_NOW)]
    ever = [gpu for gpu in gpus if _sum(gpu, _ECC_EVER) and gpu not in now]
    worn = [gpu for gpu in gpus if gpu.flag("ecc_sram_threshold_exceeded")]
    problems = []
    if worn:
        problems.append(
            fail(
                f"SRAM errors of {named(worn)} exceed the limit for replacement",
                each(worn, _ecc_counts),
                "run the vendor's field diagnostic and have it replaced",
            )
        )
    if now:
        problems.append(
            fail(
                f"{named(now)} has had memory errors that could not be corrected",
                each(now, _ecc_counts),
                "end what runs on it, then: sudo nvidia-smi --gpu-reset -i "
                + ",".join(str(gpu.facts.index) for gpu in now),
            )
        )
    if ever:
        problems.append(
            warn(
                f"{named(ever)} had uncorrected memory errors earlier in its life",
                each(ever, _ecc_counts),
                "watch whether the count grows: nvidia-smi -q -d ECC",
            )
        )
    said = (
        ok("no uncorrected memory error", each(gpus, _ecc_counts))
        if gpus
        else ok("no GPU counts memory errors (it has no ECC, or has it off)")
    )
    return together(problems, otherwise=said)


def _sum(gpu: SeenGpu, names: tuple[str, ...]) -> int:
    return int(sum(gpu.number(name) or 0 for name in names))


def _ecc_counts(gpu: SeenGpu) -> str:
    return f"{_sum(gpu, _ECC_NOW)} since the driver was loaded, {_sum(gpu, _ECC_EVER)} ever"


def memory_repairs(c: Circumstances) -> Finding:
    """GPUs replace bad memory by spare rows (from Ampere on) or leave pages out (before).

    A replacement that is pending takes effect with the next reset; until then the bad memory stays in
    use. One that failed means that the spares are used up: the GPU must be replaced. The driver may also
    say outright what it needs (recovery action). NVIDIA GPU Memory Error Management.
    """
    gpus = seen_gpus(c)
    failed = [
        gpu for gpu in gpus if gpu.flag("remapped_rows_failed") or gpu.flag("unrepairable_memory")
    ]
    pending = [gpu for gpu in gpus if _pending(gpu)]
    asking = [gpu for gpu in gpus if gpu.text("recovery_action") not in (None, "none")]
    problems = []
    if failed:
        problems.append(
            fail(
                f"{named(failed)} has bad memory and no spare rows left for it",
                each(failed, _repairs),
                "have it replaced",
            )
        )
    if pending:
        problems.append(
            warn(
                f"bad memory of {named(pending)} is replaced at the next reset",
                each(pending, _repairs),
                _reset(pending),
            )
        )
    if asking:
        problems.append(
            fail(
                f"the driver asks for recovery: {asking[0].text('recovery_action')}",
                each(asking, lambda gpu: gpu.text("recovery_action")),
                _reset(asking),
            )
        )
    return together(problems, otherwise=ok("no memory waits for repair", each(gpus, _repairs)))


def _pending(gpu: SeenGpu) -> bool:
    names = ("remapped_rows_pending", "retired_pages_pending", "repair_channel_pending")
    return any(gpu.flag(name) for name in names)


def _repairs(gpu: SeenGpu) -> str | None:
    remapped = gpu.number("remapped_rows_correctable"), gpu.number("remapped_rows_uncorrectable")
    if None not in remapped:
        return f"{sum(int(rows or 0) for rows in remapped)} rows remapped"
    retired = gpu.number("retired_pages_single_bit"), gpu.number("retired_pages_double_bit")
    return None if None in retired else f"{sum(int(pages or 0) for pages in retired)} pages retired"


def _reset(gpus: list[SeenGpu]) -> str:
    numbers = ",".join(str(gpu.facts.index) for gpu in gpus)
    return f"end what runs on it, then: sudo nvidia-smi --gpu-reset -i {numbers} (or reboot)"


def pcie_link(c: Circumstances) -> Finding:
    """A GPU in a slot, or behind a riser, with fewer lanes copies that much slower.

    An idle link slows down to save power, which is normal: the generation is judged only while the GPU
    works. The width does not change with load; fewer lanes than GPU and slot both have point to a badly
    seated card, a riser or a setting of the BIOS.
    """
    gpus = [gpu for gpu in seen_gpus(c) if gpu.knows("pcie_width", "pcie_generation")]
    if not gpus:
        return ok("no GPU tells of a PCIe link")
    narrow = [gpu for gpu in gpus if _below(gpu, "pcie_width")]
    slow = [gpu for gpu in gpus if _below(gpu, "pcie_generation") and _is_busy(gpu)]
    problems = []
    if narrow:
        problems.append(
            warn(
                f"the PCIe link of {named(narrow)} is narrower than card and slot allow",
                each(narrow, _link),
                "reseat the card, and look at riser and BIOS (bifurcation)",
            )
        )
    if slow:
        problems.append(
            warn(
                f"the PCIe link of {named(slow)} is slow under load",
                each(slow, _link),
                "look at riser and BIOS (link speed), and for replays: nvidia-smi -q -d PCIE",
            )
        )
    idle = [gpu for gpu in gpus if _below(gpu, "pcie_generation") and not _is_busy(gpu)]
    said = f"PCIe links have all their lanes{'; slower while idle, as is normal' if idle else ''}"
    return together(problems, otherwise=ok(said, each(gpus, _link)))


def _below(gpu: SeenGpu, name: str) -> bool:
    now, most = gpu.number(name), gpu.number(f"{name}_max")
    return now is not None and most is not None and 0 < now < most


def _is_busy(gpu: SeenGpu) -> bool:
    return (gpu.number("utilization_gpu_percent") or 0) >= _BUSY_PERCENT


def _link(gpu: SeenGpu) -> str:
    def told(name: str) -> str:
        number = gpu.number(name)
        return "?" if number is None else f"{number:g}"

    now = f"generation {told('pcie_generation')} x{told('pcie_width')}"
    most = f"{told('pcie_generation_max')} x{told('pcie_width_max')}"
    return f"{now} of {most}{', busy' if _is_busy(gpu) else ', idle'}"


def throttling(c: Circumstances) -> Finding:
    """Heat or a lack of power makes a GPU slow down; the driver says which.

    Seen at this moment only: run it under load. A software power cap is not counted, for it is how a
    GPU under full load is meant to run; CK031 looks at the limit itself. Power brake means that the
    power supply asked for less.
    """
    gpus = [gpu for gpu in seen_gpus(c) if gpu.words("clock_event_reasons") is not None]
    slowed = [gpu for gpu in gpus if set(gpu.words("clock_event_reasons") or ()) & set(_THROTTLES)]
    if not slowed:
        return ok("no GPU is slowed down by heat or lack of power now", each(gpus, _reasons))
    return warn(
        f"{named(slowed)} is slowed down now: {_worst(slowed[0])}",
        each(slowed, lambda gpu: f"{_reasons(gpu)}, {gpu.number('temperature_gpu_c') or 0:g} C"),
        "look at fans, airflow and power supply: nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE",
    )


def _reasons(gpu: SeenGpu) -> str:
    return ", ".join(gpu.words("clock_event_reasons") or ()) or "none"


def _worst(gpu: SeenGpu) -> str:
    return next(one for one in gpu.words("clock_event_reasons") or () if one in _THROTTLES)


def power_limit(c: Circumstances) -> Finding:
    """A power limit below the default keeps clocks down under full load.

    Somebody set it (nvidia-smi -pl), or the machine's power management did. It is lost at reboot,
    unless a service sets it again.
    """
    gpus = [gpu for gpu in seen_gpus(c) if gpu.knows("power_limit_enforced_w", "power_limit_w")]
    if not gpus:
        return ok("no GPU tells its power limit")
    low = [gpu for gpu in gpus if _limit(gpu) + 1 < (gpu.number("power_limit_default_w") or 0)]
    if not low:
        return ok("no power limit is below its default", each(gpus, _power))
    return warn(
        f"the power limit of {named(low)} is below its default",
        each(low, _power),
        f"sudo nvidia-smi -i {low[0].facts.index} -pl {low[0].number('power_limit_default_w') or 0:.0f}",
    )


def _limit(gpu: SeenGpu) -> float:
    return gpu.number("power_limit_enforced_w") or gpu.number("power_limit_w") or 0


def _power(gpu: SeenGpu) -> str:
    default = gpu.number("power_limit_default_w")
    return f"{_limit(gpu):.0f} W of {'?' if default is None else f'{default:.0f} W'}"


def persistence(c: Circumstances) -> Finding:
    """Without persistence mode the driver leaves a GPU when nobody uses it, and starts it anew each time.

    That takes a second or more for every first program, and forgets settings such as the power limit. A
    display, or any process that keeps the GPU open, has the same effect as the mode. nvidia-persistenced
    is the way to have it on.
    """
    gpus = [gpu for gpu in seen_gpus(c) if gpu.flag("persistence_mode") is not None]
    off = [
        gpu for gpu in gpus if not gpu.flag("persistence_mode") and not gpu.flag("display_active")
    ]
    if not off:
        return ok("the driver stays on every GPU" if gpus else "no GPU tells of persistence mode")
    return warn(
        f"persistence mode of {named(off)} is off: each first program waits for the GPU to start",
        each(off, lambda gpu: "off"),
        "sudo systemctl enable --now nvidia-persistenced",
        f"or until reboot: sudo nvidia-smi -i {off[0].facts.index} -pm 1",
    )
