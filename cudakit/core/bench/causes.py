"""Why figures are out of their bands: what was seen of the machine meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cudakit.core.bench.concerns import concerns
from cudakit.core.bench.environment import Environment
from cudakit.core.bench.limits import Fields
from cudakit.units import format_seconds


def causes(environments: Sequence[Environment], fields: Fields) -> tuple[str, ...]:
    """Say what may have made figures worse, each thing once, in whole sentences.

    ``environments`` are those of the cases in question, and ``fields`` are facts and telemetry of NVML.
    """
    standing = (sentence for each in environments for sentence in concerns(_without_moments(each)))
    found = [*standing, *_slowed(environments), *_pcie(fields)]
    return tuple(dict.fromkeys(found))


def _without_moments(environment: Environment) -> Environment:
    """Leave out what differs from case to case."""
    return replace(environment, before=None, after=None)


def _slowed(environments: Sequence[Environment]) -> Iterator[str]:
    """Add up for how long the clock was held down, by reason; without counters, name the reasons."""
    total: dict[str, float] = {}
    for environment in environments:
        for why, seconds in environment.slowed.items():
            total[why] = total.get(why, 0.0) + seconds
    for why, seconds in total.items():
        yield f"the clock was held down by {why} for {format_seconds(seconds)}"
    if not total:
        for environment in environments:
            held = set(concerns(environment)) - set(concerns(_without_moments(environment)))
            yield from sorted(held)


def _pcie(fields: Fields) -> Iterator[str]:
    """Compare the link with what the GPU could: its width now, and the generation of the slot."""
    width, most = fields.get("pcie_width"), fields.get("pcie_width_max")
    if isinstance(width, int) and isinstance(most, int) and 0 < width < most:
        yield f"PCIe runs with {width} of {most} lanes"
    generation, own = (
        fields.get("pcie_generation_max"),
        fields.get("pcie_generation_device_max"),
    )
    if isinstance(generation, int) and isinstance(own, int) and 0 < generation < own:
        yield f"the slot is of PCIe {generation}.0, and the GPU could {own}.0"
