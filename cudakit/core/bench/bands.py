"""What a healthy GPU of a model reaches: the expectations of ``bench suite --quick``.

Figures were measured on one H200 SXM with random data (GEMM of 8192 × 8192 × 8192 through cuBLAS, copies
of pinned memory over PCIe 5.0 x16, device-device counting reads and writes). GPUs of one node differ by
5 % and more, so a band begins well below its figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from cudakit.core.bench.result import BenchResult, CaseResult
from cudakit.units import Unavailable

Health: TypeAlias = Literal["pass", "warn", "fail"]

# Shares of the expected figure. What is far above it is no luck but another GPU, or a wrong measurement.
_WARN_BELOW = 0.93
_FAIL_BELOW = 0.85
_WARN_ABOVE = 1.15


@dataclass(frozen=True, slots=True)
class Band:
    """What is expected of one figure."""

    figure: str  # which: "gemm bf16"
    expected: float  # in units of ``unit`` per second
    unit: str  # FLOP or B

    def judge(self, per_second: float) -> Health:
        """Say how a figure lies in the band."""
        share = per_second / self.expected
        if share < _FAIL_BELOW:
            return "fail"
        return "warn" if share < _WARN_BELOW or share > _WARN_ABOVE else "pass"


@dataclass(frozen=True, slots=True)
class Judgement:
    """One figure of the health check."""

    case: CaseResult
    band: Band | Unavailable
    health: Health | Unavailable  # unavailable where nothing is expected


_H200: Mapping[str, tuple[float, str]] = MappingProxyType(
    {
        "gemm fp64": (57.1e12, "FLOP"),
        "gemm fp32": (50.6e12, "FLOP"),
        "gemm tf32": (410e12, "FLOP"),
        "gemm fp16": (764e12, "FLOP"),
        "gemm bf16": (793e12, "FLOP"),
        "gemm fp8_e4m3": (1441e12, "FLOP"),
        "copy host-to-device": (55.5e9, "B"),
        "copy device-to-host": (55.4e9, "B"),
        "copy device-to-device": (4260e9, "B"),
    }
)
_MODELS: Mapping[str, Mapping[str, tuple[float, str]]] = MappingProxyType({"NVIDIA H200": _H200})


def band(gpu: str | Unavailable, figure: str) -> Band | Unavailable:
    """Return what is expected of a figure on a model, or that no expectation is known."""
    found = _MODELS.get(str(gpu), {}).get(figure)
    return Band(figure, *found) if found else Unavailable("no expectation is known")


def judge(result: BenchResult) -> tuple[Judgement, ...]:
    """Judge every case; one whose values were wrong or that has no figure fails."""
    return tuple(map(_judged, result.results))


def figure_of(case: CaseResult) -> str:
    """Name the figure of a case: its bench, and its ``dtype`` or ``direction``."""
    kind = case.axes.get("dtype", case.axes.get("direction", ""))
    return f"{case.name} {kind}".strip()


def _judged(case: CaseResult) -> Judgement:
    expected = band(case.environment.gpu, figure_of(case))
    if isinstance(case.median_s, Unavailable):
        return Judgement(case, expected, "fail")
    if isinstance(expected, Unavailable):
        return Judgement(case, expected, expected)
    reached = case.per_second(case.operations if expected.unit == "FLOP" else case.bytes_moved)
    health = reached if isinstance(reached, Unavailable) else expected.judge(reached)
    return Judgement(case, expected, health)
