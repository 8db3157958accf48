"""Warnings: reasons to doubt the figures of a result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cudakit.bench.environment import Environment
from cudakit.bench.labels import MEASUREMENT_AXIS
from cudakit.bench.result import CaseResult
from cudakit.bench.roofline import Fields
from cudakit.gpu.api.facts import throttling_cause
from cudakit.units import Unavailable, format_seconds

# Reasons for a lower clock that need no warning.
_NORMAL_CLOCK_REASONS = ("idle", "application clocks setting", "display clock setting")
# Environment variables that change the speed of CUDA, and their effect.
_SLOWING_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "every launch waits for its kernel",
    "CUDA_INJECTION64_PATH": "a profiler or checker runs in the process",
    "NVIDIA_TF32_OVERRIDE": "it overrides the use of tf32",
}
# Kinds of constant data, which needs less power, so that the clock is higher than with real data.
_CONSTANT_FILLS = ("zeros", "ones")


def result_warnings(
    cases: Sequence[CaseResult], titles_by_warning: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield each reason to doubt the figures once, as text without a capital letter and a full stop.

    ``titles_by_warning`` has the warnings of measurements, each with the titles of the measured cases.
    """
    yield from environment_warnings(environments(cases))
    for fill in dict.fromkeys(case.method.fill for case in cases):
        if fill in _CONSTANT_FILLS:
            yield f"{fill} draw less power than real data, so these rates are too high"
    for warning, titles in titles_by_warning.items():
        yield warning + _name_cases(titles, cases)


def _name_cases(titles: Sequence[str], cases: Sequence[CaseResult]) -> str:
    """Return the first title and the number of titles as text; "" if ``titles`` has all cases."""
    case_count = len({(case.name, str({**case.axes, MEASUREMENT_AXIS: ""})) for case in cases})
    if len(titles) >= case_count:
        return ""
    return (
        f" ({titles[0]})"
        if len(titles) == 1
        else f" ({len(titles)} cases, the first is: {titles[0]})"
    )


def environments(cases: Sequence[CaseResult]) -> list[Environment]:
    """Return one environment per case; libraries whose samples are interleaved share an environment."""
    environment_by_case: dict[tuple[str, str], Environment] = {}
    for case in cases:
        environment_by_case.setdefault((case.name, str(case.axes)), case.environment)
    return [*environment_by_case.values()]


def environment_warnings(environments: Sequence[Environment]) -> tuple[str, ...]:
    """Return each warning of several environments once; throttled time is summed."""
    lasting_warnings = (
        warning for environment in environments for warning in _lasting_warnings(environment)
    )
    return tuple(dict.fromkeys([*lasting_warnings, *_throttling_warnings(environments)]))


def likely_causes(environments: Sequence[Environment], fields: Fields) -> tuple[str, ...]:
    """Return each likely cause of bad figures once.

    ``environments`` belong to the cases with bad figures; ``fields`` are facts and telemetry of NVML.
    """
    return tuple(dict.fromkeys([*environment_warnings(environments), *_pcie_warnings(fields)]))


def _lasting_warnings(environment: Environment) -> Iterator[str]:
    """Yield warnings about conditions that last for the whole run."""
    other_processes = environment.other_processes
    if isinstance(other_processes, int) and other_processes:
        process_text = "process uses" if other_processes == 1 else "processes use"
        yield f"{other_processes} other {process_text} the GPU, so rates may be too low"
    limit_w, default_limit_w = environment.power_limit_w, environment.power_limit_default_w
    if (
        not isinstance(limit_w, Unavailable)
        and not isinstance(default_limit_w, Unavailable)
        and limit_w < default_limit_w
    ):
        yield f"the power limit is {limit_w:.0f} W instead of the default {default_limit_w:.0f} W"
    if environment.modes.get("mps_enabled") is True:
        yield "MPS is on, so other processes may use the GPU unnoticed"
    for name, effect in _SLOWING_VARIABLES.items():
        if environment.variables.get(name, "0") not in ("", "0"):
            yield f"{name} is set: {effect}"


def _throttling_warnings(environments: Sequence[Environment]) -> Iterator[str]:
    """Yield the throttled time by reason or, without counters, the last reasons for a low clock."""
    total_s_by_reason: dict[str, float] = {}
    for environment in environments:
        for reason, seconds in environment.throttled_seconds.items():
            total_s_by_reason[reason] = total_s_by_reason.get(reason, 0.0) + seconds
    for reason, seconds in total_s_by_reason.items():
        yield f"the clock was throttled for {format_seconds(seconds)}: {reason}"
    if not total_s_by_reason:
        for environment in environments:
            yield from sorted(set(_throttling_reasons(environment)))


def _throttling_reasons(environment: Environment) -> Iterator[str]:
    telemetry = environment.after or environment.before
    if (
        telemetry is not None
        and isinstance(telemetry.clock_reasons, tuple)
        and not telemetry.slowed_ns
    ):
        for reason in telemetry.clock_reasons:
            if reason not in _NORMAL_CLOCK_REASONS:
                yield f"the clock was throttled: {throttling_cause(reason)}"


def _pcie_warnings(fields: Fields) -> Iterator[str]:
    """Compare the link width and the slot's generation with those that the GPU supports."""
    width, full_width = fields.get("pcie_width"), fields.get("pcie_width_max")
    if isinstance(width, int) and isinstance(full_width, int) and 0 < width < full_width:
        yield f"PCIe runs with {width} of {full_width} lanes"
    slot_generation, gpu_generation = (
        fields.get("pcie_generation_max"),
        fields.get("pcie_generation_device_max"),
    )
    if (
        isinstance(slot_generation, int)
        and isinstance(gpu_generation, int)
        and 0 < slot_generation < gpu_generation
    ):
        yield f"the slot supports PCIe {slot_generation}.0, and the GPU PCIe {gpu_generation}.0"
