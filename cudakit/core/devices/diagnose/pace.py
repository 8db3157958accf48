"""Is the hardware as fast as it could be?"""

from __future__ import annotations

from cudakit.core.devices.diagnose.check import Finding, ok, together, warn
from cudakit.core.devices.diagnose.gpus import SeenGpu, each, named, seen_gpus
from cudakit.gpu.api.run_context import RunContext

# Above this a link has left its idle state.
_BUSY_PERCENT = 10
# Reasons that take speed away from work. A power cap under load is how a GPU is meant to run.
_THROTTLES = (
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake slowdown",
)


def pcie_link(c: RunContext) -> Finding:
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


def throttling(c: RunContext) -> Finding:
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


def power_limit(c: RunContext) -> Finding:
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


def persistence(c: RunContext) -> Finding:
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
        dict.fromkeys((gpu.label for gpu in off), "off"),
        "sudo systemctl enable --now nvidia-persistenced",
        f"or until reboot: sudo nvidia-smi -i {off[0].facts.index} -pm 1",
    )
