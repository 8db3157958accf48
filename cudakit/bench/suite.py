"""``bench suite``: runs cases of the other benches as a health check; ``health`` assesses the results."""

from __future__ import annotations

from collections.abc import Iterator
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
from cudakit.gpu.api import Gpu, Memory
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
    left_out = missing_libraries(gpu)
    cases = suite_cases(spec, gpu, include_gemm=not left_out)
    result = run(spec, gpu, progress, run_context=run_context, cases=cases)
    nvml_fields: Fields = run_context.nvml_device.fields if run_context.nvml_device else {}
    telemetry = gpu.telemetry(("pcie_width",)).fields
    return assess_health(
        result, quick=spec.quick, left_out=left_out, fields={**nvml_fields, **telemetry}
    )


def missing_libraries(gpu: Gpu) -> tuple[SkippedBench, ...]:
    """Return the benches whose library is missing, with the command that installs it."""
    try:
        gpu.blas("cublaslt").close()
    except MissingDependency as error:
        return (SkippedBench("gemm", error.message, error.hint),)
    return ()


def suite_cases(spec: SuiteSpec, gpu: Gpu, *, include_gemm: bool) -> tuple[Case, ...]:
    """Return the cases of the health check: latencies first, and GEMMs last, because GEMMs heat the GPU."""
    specs = [*_specs(spec, gpu), *([_gemm_spec(spec, gpu)] if include_gemm else [])]
    cases = (case for bench_spec in specs for case in bench_spec.cases(gpu))
    if spec.quick:
        cases = (replace(case, method=replace(case.method, rounds=1)) for case in cases)
    return tuple(cases)


def _specs(spec: SuiteSpec, gpu: Gpu) -> Iterator[Spec]:
    quick, options = spec.quick, _common_options(spec)
    memory_bytes = _reduce_to_fit(gpu, _SIMULATED_MEMORY_BYTES if gpu.simulated else _MEMORY_BYTES)
    copy_bytes = _reduce_to_fit(gpu, _SIMULATED_COPY_BYTES if gpu.simulated else _COPY_BYTES)
    yield LaunchSpec(calls=_CALLS if quick else CALLS, **options)
    yield AllocSpec(allocators=("stream-ordered",), sizes_bytes=(_ALLOCATION_BYTES,), **options)
    yield CopySpec(directions=_DIRECTIONS if quick else None, sizes_bytes=(copy_bytes,), **options)
    operations = _OPERATIONS if quick else OPERATIONS
    # Small simulated buffers stay in L2, which has no theoretical peak, unless buffer sets rotate.
    method: dict[str, Any] = {"mode": "isolated", "cache": "rotate"} if gpu.simulated else {}
    yield MemorySpec(operations=operations, sizes_bytes=(memory_bytes,), **method, **options)


def _gemm_spec(spec: SuiteSpec, gpu: Gpu) -> Spec:
    edge, free_bytes = _SIMULATED_EDGE if gpu.simulated else _EDGE, gpu.memory_info().free_bytes
    while edge > 1 and FP64.size_bytes * edge**2 * _FREE_DIVISOR > free_bytes:
        edge //= 2
    gemms = tuple(Gemm(dtype=dtype, m=edge, n=edge, k=edge) for dtype in _DATA_TYPES)
    # The CPU computes the GEMMs of a simulated device, and few executions on one buffer set suffice.
    method: dict[str, Any] = {"mode": "isolated", "cache": "hot"} if gpu.simulated else {}
    return GemmSpec(gemms=gemms, **method, **_common_options(spec))


def _common_options(spec: SuiteSpec) -> dict[str, Any]:
    """Return the options that the Specs of all benches share."""
    rule = {"rule": _QUICK_RULE} if spec.quick else {}
    return {"seed": spec.seed, "blocker": spec.blocker, **rule}


def _reduce_to_fit(gpu: Memory, size_bytes: int) -> int:
    """Halve a buffer size until a case fits in the free memory."""
    free_bytes = gpu.memory_info().free_bytes
    while size_bytes * _FREE_DIVISOR > free_bytes:
        size_bytes //= 2
    return size_bytes
