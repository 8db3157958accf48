"""The speed that cudakit must reach for each operation, beside the measured speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from cudakit.bench.method import CUDAKIT
from cudakit.bench.present.baselines import RelativeRate, measured_baselines, ratio_to
from cudakit.bench.result import CaseResult
from cudakit.bench.spec import TIMINGS
from cudakit.gpu.api.operations import TARGET_ELEMENTS
from cudakit.report.document import Column, Node, Section, Table, Text, Value
from cudakit.units import Unavailable

# Speed relative to torch that cudakit must reach, by operation.
TARGET_RATIOS: Mapping[str, float] = MappingProxyType(
    {"add": 3.0, "matmul": 1.5, "softmax": 1.4, "sum": 1.5}
)
_TORCH = "torch"
_CAPTION = (
    "Target: speed relative to torch that the requirements of cudakit state for this operation and size. "
    "Measured: time of torch divided by that of cudakit, median of interleaved samples."
)


def target_section(cases: Sequence[CaseResult]) -> Iterator[Node]:
    """Show whether cudakit reaches the target speed of each operation at its target size, in each timing.

    Nothing is shown without a measurement of torch.
    """
    target_cases = [
        case
        for case in cases
        if case.library == CUDAKIT
        and "timing" in case.axes
        and case.axes.get("elements") == TARGET_ELEMENTS.get(str(case.axes.get("operation")))
    ]
    if not target_cases or _TORCH not in measured_baselines(cases):
        return
    case_by_key = {(case.axes["operation"], case.axes["timing"]): case for case in target_cases}
    operations = list(dict.fromkeys(str(case.axes["operation"]) for case in target_cases))
    timings = [
        timing for timing in TIMINGS if any(timing == key_timing for _, key_timing in case_by_key)
    ]
    rows = tuple(
        (
            Text(operation),
            Text(f"{TARGET_ELEMENTS[operation]:,}"),
            Text(f"{TARGET_RATIOS[operation]:.1f}x"),
            *(
                _describe_ratio(case_by_key.get((operation, timing)), operation, cases)
                for timing in timings
            ),
        )
        for operation in operations
    )
    columns = (
        Column("operation", "text"),
        Column("elements", "number"),
        Column("target", "number"),
        *(Column(timing, "text") for timing in timings),
    )
    yield Section("Speed relative to torch, and targets", (Table(columns, rows, _CAPTION),))


def _describe_ratio(case: CaseResult | None, operation: str, cases: Sequence[CaseResult]) -> Value:
    """Return the measured ratio, and whether it reaches the target: ``1.21x, missed``."""
    if case is None:
        return Text("-")
    rate_ratio = ratio_to(_TORCH, case, cases)
    if isinstance(rate_ratio, Unavailable):
        return rate_ratio
    return Text(f"{rate_ratio.ratio:.2f}x, {_verdict(rate_ratio, TARGET_RATIOS[operation])}")


def _verdict(relative_rate: RelativeRate, target_ratio: float) -> str:
    return "reached" if relative_rate.ratio >= target_ratio else "missed"
