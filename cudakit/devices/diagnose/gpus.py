"""The state of each GPU, and rules that check the state of single GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from cudakit.devices.diagnose.check import (
    Finding,
    NotCheckable,
    Status,
    combine_findings,
    ok_finding,
)
from cudakit.devices.diagnose.driver import require_nvml
from cudakit.devices.match import match_devices
from cudakit.gpu.api.facts import DeviceFacts, Field, Telemetry
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable


@dataclass(frozen=True, slots=True)
class GpuState:
    """The facts and the telemetry of one GPU that NVML reports."""

    facts: DeviceFacts
    fields: Mapping[
        str, Field
    ]  # values of NVML; values of CUDA for fields that NVML does not report

    @property
    def label(self) -> str:
        return f"GPU {self.facts.index}"

    def number_field(self, name: str) -> float | None:
        field_value = self.fields.get(name)
        if isinstance(field_value, bool) or not isinstance(field_value, (int, float)):
            return None
        return field_value

    def text_field(self, name: str) -> str | None:
        field_value = self.fields.get(name)
        return field_value if isinstance(field_value, str) else None

    def flag_field(self, name: str) -> bool | None:
        field_value = self.fields.get(name)
        return field_value if isinstance(field_value, bool) else None

    def text_list_field(self, name: str) -> tuple[str, ...] | None:
        field_value = self.fields.get(name)
        return tuple(map(str, field_value)) if isinstance(field_value, tuple) else None

    def has_any_field(self, *names: str) -> bool:
        """Return whether NVML reported a value for at least one of the named fields."""
        field_values = (self.fields.get(name) for name in names)
        return any(
            field_value is not None and not isinstance(field_value, Unavailable)
            for field_value in field_values
        )


def gpu_states(context: RunContext) -> tuple[GpuState, ...]:
    """Return the GPUs without their MIG instances. Raises NotCheckable if NVML reports none."""
    require_nvml(context)
    gpus = tuple(_states(context))
    if not gpus:
        raise NotCheckable("NVML reports no GPU (CK007)")
    return gpus


def _states(context: RunContext) -> Iterator[GpuState]:
    matched_devices = (
        device for device in match_devices(context.nvml, context.cuda) if device.nvml is not None
    )
    for device, telemetry in zip_longest(matched_devices, context.telemetry):
        fields = telemetry.fields if isinstance(telemetry, Telemetry) else {}
        if device.nvml is not None and device.nvml.parent is None:
            yield GpuState(device.nvml, {**device.fields, **fields})


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
    *,
    summary_without_gpus: str = "",
) -> Finding:
    """Return the findings of the rules. If there are none, return OK with ``summary_if_ok``.

    Raises NotCheckable with ``summary_without_gpus`` if that is given and there is no GPU.
    """
    if not gpus and summary_without_gpus:
        raise NotCheckable(summary_without_gpus)
    findings = (finding for rule in rules for finding in rule.findings(gpus))
    return combine_findings(
        findings, otherwise=ok_finding(summary_if_ok, evidence_of(gpus, describe))
    )
