"""Why figures are out of their bands: what was seen of the machine meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudakit.core.bench.concerns import concerns_of
from cudakit.core.bench.environment import Environment
from cudakit.core.bench.limits import Fields


def causes(environments: Sequence[Environment], fields: Fields) -> tuple[str, ...]:
    """Say what may have made figures worse, each thing once, in whole sentences.

    ``environments`` are those of the cases in question, and ``fields`` are facts and telemetry of NVML.
    """
    return tuple(dict.fromkeys([*concerns_of(environments), *_pcie(fields)]))


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
