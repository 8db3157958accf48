"""``bench suite``: runs cases of the other benches as a health check; ``health`` assesses the results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cudakit.bench.alloc import AllocSpec
from cudakit.bench.case import Case, Rule
from cudakit.bench.copy import CopySpec
from cudakit.bench.gemm import GemmSpec
from cudakit.bench.health import SkippedBench, SuiteResult, assess_health
from cudakit.bench.launch import CALLS, LaunchSpec
from cudakit.bench.memory import OPERATIONS, MemorySpec
from cudakit.bench.pipeline import Progress, no_progress, run
from cudakit.bench.roofline import Fields
from cudakit.bench.spec import Spec
from cudakit.errors import MissingDependency
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.arrays import FP64
from cudakit.gpu.api.facts import RunContext
from cudakit.gpu.api.gemm import Gemm

_QUICK_S = 60.0
# The stopping rule of a quick run: enough samples for a CI of a few percent.
_QUICK_RULE = Rule(min_time_s=0.3, timeout_s=4.0)
_DATA_TYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "int8")
_CALLS = ("launch", "launch-to-start", "launch-to-finish", "launch-back-to-back")
_OPERATIONS = ("copy", "triad", "read")
_DIRECTIONS = ("h2d", "d2h", "d2d")

_MEMORY_BYTES, _COPY_BYTES, _EDGE, _ALLOCATION_BYTES = 1 << 30, 512 << 20, 8192, 1 << 20
# Simulated kernels run on the CPU, so sizes are smaller.
_SIMULATED_MEMORY_BYTES, _SIMULATED_COPY_BYTES, _SIMULATED_EDGE = 1 << 20, 1 << 20, 64
# A buffer is at most the free memory divided by this number: a case has up to three buffers, and workspace.
_FREE_DIVISOR = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteSpec(Spec):
    """Options of ``cudakit bench suite``; ``quick`` takes about a minute."""

    bench: ClassVar[str] = "suite"

    quick: bool = False

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        if self.quick and self.budget_s is None:
            object.__setattr__(self, "budget_s", _QUICK_S)


def check_health(
    spec: SuiteSpec,
    gpu: Gpu,
    progress: Progress = no_progress,
    *,
    run_context: RunContext | None = None,
) -> SuiteResult:
    """Measure and assess a GPU. A bench whose library is missing is not run; the result lists it.

    Raises the errors of ``pipeline.run``.
    """
    run_context = run_context or RunContext()
    left_out: tuple[SkippedBench, ...] = ()
    try:
        gpu.blas("cublaslt").close()
    except MissingDependency as error:
        left_out = (SkippedBench("gemm", error.message, error.hint),)
    cases = suite_cases(spec, gpu, include_gemm=not left_out)
    result = run(spec, gpu, progress, run_context=run_context, cases=cases)
    nvml_fields: Fields = run_context.nvml_device.fields if run_context.nvml_device else {}
    fields = {**nvml_fields, **gpu.telemetry(("pcie_width",)).fields}
    return assess_health(result, quick=spec.quick, left_out=left_out, fields=fields)


def suite_cases(spec: SuiteSpec, gpu: Gpu, *, include_gemm: bool) -> tuple[Case, ...]:
    """Return the cases of the health check: latencies first, and GEMMs last, because GEMMs heat the GPU."""
    quick, simulated, free_bytes = spec.quick, gpu.simulated, gpu.memory_info().free_bytes

    def fitting(size_bytes: int) -> int:
        """Halve a buffer size until a case fits in the free memory."""
        while size_bytes * _FREE_DIVISOR > free_bytes:
            size_bytes //= 2
        return size_bytes

    options: dict[str, Any] = {"seed": spec.seed, "blocker": spec.blocker}
    if quick:
        options["rule"] = _QUICK_RULE
    # Small simulated buffers stay in L2, which has no theoretical peak, unless buffer sets rotate. The CPU
    # computes simulated GEMMs, and few executions on one buffer set suffice.
    rotated = {"mode": "isolated", "cache": "rotate"} if simulated else {}
    hot = {"mode": "isolated", "cache": "hot"} if simulated else {}
    memory_bytes = fitting(_SIMULATED_MEMORY_BYTES if simulated else _MEMORY_BYTES)
    copy_bytes = fitting(_SIMULATED_COPY_BYTES if simulated else _COPY_BYTES)
    specs: list[Spec] = [
        LaunchSpec(calls=_CALLS if quick else CALLS, **options),
        AllocSpec(allocators=("stream-ordered",), sizes_bytes=(_ALLOCATION_BYTES,), **options),
        CopySpec(directions=_DIRECTIONS if quick else None, sizes_bytes=(copy_bytes,), **options),
        MemorySpec(
            operations=_OPERATIONS if quick else OPERATIONS,
            sizes_bytes=(memory_bytes,),
            **{**rotated, **options},
        ),
    ]
    if include_gemm:
        edge = _SIMULATED_EDGE if simulated else _EDGE
        while edge > 1 and FP64.size_bytes * edge**2 * _FREE_DIVISOR > free_bytes:
            edge //= 2
        gemms = tuple(Gemm(dtype=dtype, m=edge, n=edge, k=edge) for dtype in _DATA_TYPES)
        specs.append(GemmSpec(gemms=gemms, **{**hot, **options}))
    cases = (case for bench_spec in specs for case in bench_spec.cases(gpu))
    if quick:
        cases = (replace(case, method=replace(case.method, rounds=1)) for case in cases)
    return tuple(cases)
