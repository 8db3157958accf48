"""Warnings: what in the state of the machine makes figures doubtful or worse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cudakit.core.bench.environment import Environment
from cudakit.core.bench.result import CaseResult
from cudakit.core.bench.roofline import Fields
from cudakit.units import Unavailable, format_seconds

# Reasons for a lower clock that need no warning.
_NORMAL = ("idle", "application clocks setting", "display clock setting")
# Variables that make CUDA slower, with their effect.
_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "every launch waits for its kernel",
    "CUDA_INJECTION64_PATH": "a profiler or checker is in the process",
    "NVIDIA_TF32_OVERRIDE": "tf32 is forced on or off",
}
# Constant bits cost no energy: the clock stays higher than with real data.
_CONSTANT_FILLS = ("zeros", "ones")


def result_warnings(
    cases: Sequence[CaseResult], deviations: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield the reasons to doubt the figures of cases, each once, as whole sentences.

    ``deviations`` from the method are given with the titles of their cases.
    """
    yield from environment_warnings(environments(cases))
    for fill in dict.fromkeys(case.method.fill for case in cases):
        if fill in _CONSTANT_FILLS:
            yield f"{fill} draw less power than other data, so that figures are better than in use"
    for deviation, titles in deviations.items():
        others = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
        yield f"{deviation} ({titles[0]}{others})"


def environments(cases: Sequence[CaseResult]) -> list[Environment]:
    """List the environment of each case once: interleaved implementations have the same."""
    first: dict[tuple[str, str], Environment] = {}
    for case in cases:
        first.setdefault((case.name, str(case.axes)), case.environment)
    return [*first.values()]


def environment_warnings(environments: Sequence[Environment]) -> tuple[str, ...]:
    """Return the warnings of several environments, each once; throttled time is added up."""
    standing = (sentence for each in environments for sentence in _standing(each))
    return tuple(dict.fromkeys([*standing, *_throttled(environments)]))


def likely_causes(environments: Sequence[Environment], fields: Fields) -> tuple[str, ...]:
    """Return what may have made figures worse, each thing once, as whole sentences.

    ``environments`` are those of the cases in question, ``fields`` the facts and telemetry of NVML.
    """
    return tuple(dict.fromkeys([*environment_warnings(environments), *_pcie(fields)]))


def _standing(environment: Environment) -> Iterator[str]:
    others = environment.other_processes
    if isinstance(others, int) and others:
        yield f"{others} other {_plural('process', others)} on the GPU: figures may be too low"
    yield from _power_limit(environment)
    if environment.modes.get("mps_enabled") is True:
        yield "MPS is on: others may share the GPU unseen"
    for name, effect in _SLOWING.items():
        if environment.variables.get(name, "0") not in ("", "0"):
            yield f"{name} is set: {effect}"


def _power_limit(environment: Environment) -> Iterator[str]:
    limit, default = environment.power_limit_w, environment.power_limit_default_w
    if isinstance(limit, Unavailable) or isinstance(default, Unavailable):
        return
    if limit < default:
        yield f"the power limit is {limit:.0f} W, not the default of {default:.0f} W"


def _throttled(environments: Sequence[Environment]) -> Iterator[str]:
    """Add up the throttled time by reason; without counters, name the reasons of the last reading."""
    total: dict[str, float] = {}
    for environment in environments:
        for why, seconds in environment.slowed.items():
            total[why] = total.get(why, 0.0) + seconds
    for why, seconds in total.items():
        yield f"the clock was held down by {why} for {format_seconds(seconds)}"
    if not total:
        for environment in environments:
            yield from sorted(set(_throttling_reasons(environment)))


def _throttling_reasons(environment: Environment) -> Iterator[str]:
    last = environment.after or environment.before
    if last is not None and isinstance(last.clock_reasons, tuple) and not last.slowed_ns:
        for why in last.clock_reasons:
            if why not in _NORMAL:
                yield f"the clock was held down: {why}"


def _pcie(fields: Fields) -> Iterator[str]:
    """Compare the width of the link and the generation of the slot with what the GPU supports."""
    width, most = fields.get("pcie_width"), fields.get("pcie_width_max")
    if isinstance(width, int) and isinstance(most, int) and 0 < width < most:
        yield f"PCIe runs with {width} of {most} lanes"
    generation, own = (
        fields.get("pcie_generation_max"),
        fields.get("pcie_generation_device_max"),
    )
    if isinstance(generation, int) and isinstance(own, int) and 0 < generation < own:
        yield f"the slot is of PCIe {generation}.0, and the GPU could {own}.0"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}es"
