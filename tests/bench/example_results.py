"""Example results for tests, which need no device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cudakit.bench.case import Method, Verification
from cudakit.bench.environment import Environment, environment
from cudakit.bench.result import BenchResult, CaseResult
from cudakit.bench.roofline import Work, limit
from cudakit.bench.stats import Samples
from cudakit.bench.summary import case_result
from cudakit.gpu.api.facts import DeviceFacts, Field, RunContext, Telemetry
from cudakit.units import Unavailable

# Facts of an H200 that CUDA reports.
CUDA_FIELDS: Mapping[str, Field] = {
    "name": "NVIDIA H200",
    "compute_capability": "9.0",
    "multiprocessor_count": 132,
    "clock_rate_khz": 1_980_000,
    "memory_clock_rate_khz": 3_201_000,
    "global_memory_bus_width_bits": 6016,
    "usable_memory_bytes": 150_109_880_320,
    "l2_cache_size_bytes": 62_914_560,
    "ecc_enabled": True,
    "mps_enabled": False,
    "integrated": False,
}
NVML_FIELDS: Mapping[str, Field] = {
    "pcie_generation_max": 5,
    "pcie_width_max": 16,
    "power_limit_default_w": 700.0,
    "persistence_mode": True,
    "mig_mode": Unavailable("not supported by this device"),
}
VERSIONS = {"driver": "580.159.04", "CUDA": "13.0", "cublas": "13.1.0", "cudakit": "0.1.0"}
PASSED_VERIFICATION = Verification(True, 2.1e-3, 1e-2, "an fp64 computation of 64 rows")
FAILED_VERIFICATION = Verification(False, 0.7, 1e-2, "an fp64 computation of 64 rows")


def facts(**changes: Field) -> DeviceFacts:
    return DeviceFacts(0, "GPU-0", "0000:65:00.0", {**CUDA_FIELDS, **changes})


def telemetry(time_ns: int = 0, **changes: Field) -> Telemetry:
    fields: dict[str, Field] = {
        "clock_sm_mhz": 1755,
        "clock_memory_mhz": 3201,
        "temperature_gpu_c": 55,
        "power_draw_w": 650.5,
        "power_limit_enforced_w": 700.0,
        "energy_j": 8000.0 + time_ns / 1e9 * 600,
        "clock_event_reasons": (),
        "slowed_by_power_cap_ns": 0,
    }
    return Telemetry(time_ns, {**fields, **changes})


def machine(**changes: Any) -> Environment:
    example = environment(
        facts(),
        RunContext(
            versions=VERSIONS,
            nvml_device=DeviceFacts(0, "GPU-0", "0000:65:00.0", NVML_FIELDS),
            other_processes=0,
            variables={"CUDA_VISIBLE_DEVICES": "0", "HOME": "/home/user"},
            command=("cudakit", "bench", "gemm"),
        ),
        simulated=False,
        before=telemetry(),
        after=telemetry(2_000_000_000),
    )
    return replace(example, **changes)


def samples_near(median_s: float) -> Samples:
    """Return 64 samples, evenly within 2 % of a time and in mixed order, at clocks near 1755 MHz.

    All times are multiples of a power of two: sums are exact, and golden files are the same everywhere.
    """
    step_s = 2.0 ** (math.floor(math.log2(median_s)) - 11)
    middle = round(median_s / step_s) * step_s
    steps = [i * 37 % 64 - 31.5 for i in range(64)]
    return Samples(
        tuple(middle + step_s * step for step in steps),
        tuple(1.755e9 + 1e5 * step for step in steps),
    )


def gemm(size: int = 8192, *, rate: float = 790e12, **changes: Any) -> CaseResult:
    """Return the result of a GEMM that ran at a rate."""
    operations, moved = 2.0 * size**3, 3 * 2.0 * size**2
    samples = changes.pop("samples", samples_near(operations / rate))
    defaults: dict[str, Any] = {
        "method": Method("isolated", "rotate", warmup_s=3.0, buffer_sets=2),
        "environment": machine(),
        "limit": limit(Work(operations, "bf16", moved), {**NVML_FIELDS, **CUDA_FIELDS}, 1.755e9),
        "verification": PASSED_VERIFICATION,
        "operations": operations,
        "bytes_moved": moved,
        "energy_j": operations * 0.8e-12,
    }
    axes = {"m": size, "n": size, "k": size, "dtype": "bf16"}
    return case_result("gemm", axes, samples, **{**defaults, **changes})


def launch(**changes: Any) -> CaseResult:
    """Return the result of a latency."""
    defaults: dict[str, Any] = {
        "method": Method("host", "hot", blocker=False),
        "environment": machine(),
        "limit": Unavailable("no limit is known for what a latency has no theoretical peak"),
    }
    return case_result(
        "launch", {"kernel": "empty"}, samples_near(2.1e-6), **{**defaults, **changes}
    )


def result(*cases: CaseResult, **changes: Any) -> BenchResult:
    example = BenchResult(
        simulated=False,
        bench=cases[0].name if cases else "gemm",
        time_ns=1_795_000_000_000_000_000,
        complete=True,
        warnings=(),
        results=cases,
    )
    return replace(example, **changes)
