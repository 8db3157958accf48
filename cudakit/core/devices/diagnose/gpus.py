"""The GPUs as NVML saw them, in the form that checks ask in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cudakit.core.devices.diagnose.check import CannotTell
from cudakit.gpu.api.facts import DeviceFacts, Field
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """One GPU: what NVML knows of it, facts and telemetry together."""

    facts: DeviceFacts
    fields: Mapping[str, Field]

    @property
    def label(self) -> str:
        return f"GPU {self.facts.index}"

    @property
    def name(self) -> str:
        return self.text("name") or "?"

    def number(self, name: str) -> float | None:
        value = self.fields.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def text(self, name: str) -> str | None:
        value = self.fields.get(name)
        return value if isinstance(value, str) else None

    def flag(self, name: str) -> bool | None:
        value = self.fields.get(name)
        return value if isinstance(value, bool) else None

    def words(self, name: str) -> tuple[str, ...] | None:
        value = self.fields.get(name)
        return tuple(map(str, value)) if isinstance(value, tuple) else None

    def knows(self, *names: str) -> bool:
        """Say whether NVML gave a value for one of these at least."""
        known = (self.fields.get(name) for name in names)
        return any(value is not None and not isinstance(value, Unavailable) for value in known)


def seen_gpus(circumstances: RunContext) -> tuple[SeenGpu, ...]:
    """Return the GPUs, without their MIG instances. Raises CannotTell where NVML does not answer."""
    if isinstance(circumstances.nvml, Unavailable):
        raise CannotTell("NVML does not answer (CK003)")
    gpus = tuple(_gpus(circumstances, circumstances.nvml.devices))
    if not gpus:
        raise CannotTell("NVML sees no GPU (CK007)")
    return gpus


def _gpus(circumstances: RunContext, devices: Sequence[DeviceFacts]) -> Iterator[SeenGpu]:
    for at, device in enumerate(devices):
        told = circumstances.telemetry[at] if at < len(circumstances.telemetry) else None
        moving = {} if told is None or isinstance(told, Unavailable) else told.fields
        if device.parent is None:
            yield SeenGpu(device, {**device.fields, **moving})


def each(gpus: Sequence[SeenGpu], say: Callable[[SeenGpu], str | None]) -> dict[str, str]:
    """Make evidence: what there is to say of each GPU, left out where that is nothing."""
    said = {gpu.label: say(gpu) for gpu in gpus}
    return {label: text for label, text in said.items() if text}


def named(gpus: Sequence[SeenGpu]) -> str:
    """Name GPUs in a sentence: "GPU 0", "GPUs 0, 2 and 3"."""
    numbers = [str(gpu.facts.index) for gpu in gpus]
    if len(numbers) == 1:
        return f"GPU {numbers[0]}"
    return f"GPUs {', '.join(numbers[:-1])} and {numbers[-1]}"
