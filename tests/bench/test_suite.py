from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from cudakit.bench.case import Case, Verification
from cudakit.bench.health import SkippedBench
from cudakit.bench.suite import SuiteSpec, check_health, suite_cases
from cudakit.errors import CudaError, MissingDependency
from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.facts import RunContext, Telemetry
from cudakit.gpu.api.gemm import Blas, Library
from cudakit.gpu.sim import Sim
from cudakit.units import Unavailable

QUICK_CASES = {
    "launch": {"launch", "launch-to-start", "launch-to-finish", "launch-back-to-back"},
    "alloc": {"stream-ordered"},
    "copy": {"h2d", "d2h", "d2d"},
    "memory": {"copy", "triad", "read"},
    "gemm": {"fp64", "fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "int8"},
}
NAMING_AXES = {
    "launch": "call",
    "alloc": "allocator",
    "copy": "direction",
    "memory": "operation",
    "gemm": "dtype",
}


class NotSimulated(Sim):
    """A simulated device that claims to be real, so that its cases are those of a real device."""

    simulated = False


def measured_by_bench(cases: tuple[Case, ...]) -> Mapping[str, set[Any]]:
    suite_result: dict[str, set[Any]] = {}
    for case in cases:
        name = case.workload.name
        suite_result.setdefault(name, set()).add(case.workload.axes[NAMING_AXES[name]])
    return suite_result


def test_quick_suite_has_fewer_cases_of_full_size() -> None:
    spec = SuiteSpec(quick=True)
    with closing(NotSimulated()) as gpu:
        cases = suite_cases(spec, gpu, include_gemm=True)

    assert measured_by_bench(cases) == QUICK_CASES
    by_name = {case.workload.name: case for case in cases}
    assert by_name["memory"].size_bytes == 1 << 30
    assert by_name["copy"].size_bytes == 512 << 20
    assert by_name["gemm"].workload.axes["m"] == 8192
    assert spec.budget_s == 60
    assert {case.method.rounds for case in cases} == {1}
    assert cases[-1].workload.name == "gemm"


def test_full_suite_has_all_cases_without_budget() -> None:
    spec = SuiteSpec()
    with closing(NotSimulated("h200x2")) as gpu:
        suite_result = measured_by_bench(suite_cases(spec, gpu, include_gemm=True))

    assert spec.budget_s is None
    assert all(QUICK_CASES[name] <= suite_result[name] for name in QUICK_CASES)
    assert suite_result["copy"] >= {"both", "pageable-h2d", "peer"}


def test_small_gpu_has_smaller_buffers_and_gemms() -> None:
    with closing(NotSimulated(capacity_bytes=1 << 30)) as gpu:
        cases = suite_cases(SuiteSpec(quick=True), gpu, include_gemm=True)

    assert all(case.needed_bytes < 1 << 30 for case in cases)
    assert {case.workload.axes.get("m") for case in cases} == {None, 4096}


def test_suite_on_simulated_gpu_is_not_assessed() -> None:
    with closing(Sim()) as gpu:
        free_bytes = gpu.memory_info().free_bytes
        suite_result = check_health(SuiteSpec(quick=True), gpu, run_context=RunContext())

        assert gpu.memory_info().free_bytes == free_bytes
    assert suite_result.simulated
    assert suite_result.bench.bench == "suite"
    assert suite_result.health == Unavailable(
        "not assessed: all values are simulated, computed on the CPU"
    )
    assert len(suite_result.figures) == len(suite_result.bench.results) == 18
    checks = [case.verification for case in suite_result.bench.results]
    assert sum(isinstance(check, Verification) and check.passed for check in checks) == 14
    assert suite_result.left_out == ()


class WithoutBlas(Sim):
    """A simulated device without a BLAS library."""

    def blas(self, library: Library = "cublaslt") -> Blas:
        raise MissingDependency(library, purpose="multiplying", requirement="nvmath-python>=1.0,<2")


def test_suite_without_cublas_runs_other_benches() -> None:
    with closing(WithoutBlas()) as gpu:
        suite_result = check_health(SuiteSpec(quick=True), gpu)

    assert suite_result.left_out == (
        SkippedBench(
            "gemm",
            "cublaslt is not installed, and multiplying needs it",
            "pip install 'nvmath-python>=1.0,<2'",
        ),
    )
    assert len(suite_result.figures) == 11


class FailingBlas(Sim):
    """A simulated device whose BLAS library cannot be opened because of a device error."""

    def blas(self, library: Library = "cublaslt") -> Blas:
        raise CudaError(214, "CUDA_ERROR_ECC_UNCORRECTABLE", library)


def test_device_error_of_blas_propagates() -> None:
    with closing(FailingBlas()) as gpu, pytest.raises(CudaError, match="ECC"):
        check_health(SuiteSpec(quick=True), gpu)


class NarrowLink(WithoutBlas):
    """A simulated device with half of its PCIe lanes, which loses the last word of large copies."""

    def telemetry(self, names: Collection[str] = ()) -> Telemetry:
        suite_result = super().telemetry(names)
        return replace(suite_result, fields={**suite_result.fields, "pcie_width": 8})

    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        super().copy(dst, src, size_bytes - 4 * (size_bytes >= 1 << 20), stream)


def test_failing_suite_names_narrow_pcie_link_as_cause() -> None:
    with closing(NarrowLink()) as gpu:
        nvml_facts = replace(gpu.facts(), fields={"pcie_width_max": 16})
        run_context = RunContext(nvml_device=nvml_facts)
        suite_result = check_health(SuiteSpec(quick=True), gpu, run_context=run_context)

    assert suite_result.health == "fail"
    assert suite_result.causes == ("PCIe runs with 8 of 16 lanes",)
