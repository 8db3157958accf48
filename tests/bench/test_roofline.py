from __future__ import annotations

from dataclasses import replace

import pytest
from bench.example_results import CUDA_FIELDS, NVML_FIELDS
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.roofline import (
    Limit,
    Work,
    limit,
    link_bandwidth,
    matrix_kind,
    memory_bandwidth,
    peak_operations,
    peer_bandwidth,
    rate_per_clock,
)
from cudakit.gpu.api.facts import Field
from cudakit.units import Unavailable

H200_FIELDS: dict[str, Field] = {**NVML_FIELDS, **CUDA_FIELDS}
NOT_MEASURED = Unavailable("not measured")


def device(name: str, capability: str, multiprocessors: int, clock_mhz: int) -> dict[str, Field]:
    return {
        "name": name,
        "compute_capability": capability,
        "multiprocessor_count": multiprocessors,
        "clock_rate_khz": clock_mhz * 1000,
    }


def limit_of(work: Work, clock_hz: float | Unavailable = NOT_MEASURED, **changes: Field) -> Limit:
    bound = limit(work, {**H200_FIELDS, **changes}, clock_hz)
    assert isinstance(bound, Limit), bound
    return bound


# Rates of datasheets in TFLOP/s or TOP/s, for dense operands and fp32 accumulation.
@pytest.mark.parametrize(
    ("fields", "kind", "datasheet_rate"),
    [
        (device("NVIDIA H200", "9.0", 132, 1830), "bf16", 989.4),
        (device("NVIDIA H200", "9.0", 132, 1830), "fp8", 1979),
        (device("NVIDIA H200", "9.0", 132, 1830), "tf32", 494.7),
        (device("NVIDIA H200", "9.0", 132, 1980), "fp64_tensor", 67),
        (device("NVIDIA H200", "9.0", 132, 1980), "fp32", 67),
        (device("NVIDIA A100-SXM4-80GB", "8.0", 108, 1410), "fp16", 312),
        (device("NVIDIA A100-SXM4-80GB", "8.0", 108, 1410), "int8", 624),
        (device("NVIDIA A100-SXM4-80GB", "8.0", 108, 1410), "fp64_tensor", 19.5),
        (device("NVIDIA RTX A6000", "8.6", 84, 1800), "bf16", 154.8),
        (device("NVIDIA GeForce RTX 3090", "8.6", 82, 1695), "bf16", 71),
        (device("NVIDIA GeForce RTX 4090", "8.9", 128, 2520), "fp16", 165.2),
        (device("NVIDIA GeForce RTX 4090", "8.9", 128, 2520), "int8", 660.6),
        (device("NVIDIA L40S", "8.9", 142, 2520), "fp8", 733),
        (device("Tesla T4", "7.5", 40, 1590), "fp16", 65),
        (device("NVIDIA B200", "10.0", 148, 1850), "bf16", 2250),
    ],
)
def test_peaks_are_those_of_the_datasheets(
    fields: dict[str, Field], kind: str, datasheet_rate: float
) -> None:
    clock_hz = float(str(fields["clock_rate_khz"])) * 1e3

    assert peak_operations(kind, fields, clock_hz) == pytest.approx(datasheet_rate * 1e12, rel=0.02)


def test_bandwidths_are_those_of_the_datasheets() -> None:
    assert memory_bandwidth(H200_FIELDS) == pytest.approx(4.8e12, rel=0.01)
    assert link_bandwidth(H200_FIELDS) == pytest.approx(63e9, rel=0.01)


def test_large_gemm_is_bound_by_arithmetic() -> None:
    bound = limit_of(Work(2 * 8192**3, "bf16", 6 * 8192**2), 1.755e9)

    assert bound.bound == "arithmetic"
    assert bound.datasheet_clock_hz == 1.83e9
    assert bound.datasheet_s == pytest.approx(2 * 8192**3 / 989.4e12, rel=1e-3)
    assert bound.measured_s == pytest.approx(bound.datasheet_s * 1830 / 1755)
    assert bound.seconds == bound.measured_s


def test_small_gemm_is_bound_by_memory_at_any_clock() -> None:
    bound = limit_of(Work(2 * 64 * 8192**2, "bf16", 2 * 8192**2), 1.2e9)

    assert bound.bound == "memory"
    assert bound.measured_s == bound.datasheet_s


def test_host_copy_is_bound_by_link() -> None:
    bound = limit_of(Work(bytes_moved=2**30, link_bytes=2**30))

    assert bound.bound == "link"
    assert bound.seconds == pytest.approx(2**30 / 63e9, rel=1e-3)
    assert isinstance(bound.operations_per_s, Unavailable)


def test_limit_without_measured_clock_uses_datasheet() -> None:
    bound = limit_of(Work(1e15, "bf16"))

    assert bound.measured_s == NOT_MEASURED
    assert bound.seconds == bound.datasheet_s


def test_bound_without_transfers_needs_no_bandwidths() -> None:
    bound = limit_of(Work(1e15, "bf16"), memory_clock_rate_khz=0, pcie_width_max=0)

    assert bound.bound == "arithmetic"
    assert bound.bytes_per_s == Unavailable("the memory clock is unknown")


@pytest.mark.parametrize(
    ("work", "changes", "reason"),
    [
        (Work(), {}, "a latency has no theoretical peak"),
        (Work(1, "fp4"), {}, "the peak of fp4 is unknown for compute capability 9.0"),
        (Work(1, "bf16"), {"compute_capability": "12.0"}, "compute capability 12.0"),
        (Work(1, "fp32"), {"clock_rate_khz": 0}, "maximum SM clock is unknown"),
        (Work(1, "fp32"), {"multiprocessor_count": Unavailable("lost")}, "SMs is unknown: lost"),
        (Work(bytes_moved=1), {"integrated": True}, "integrated"),
        (Work(bytes_moved=1), {"global_memory_bus_width_bits": Unavailable("MIG")}, "MIG"),
        (Work(link_bytes=1), {"pcie_generation_max": 9}, "PCIe 9.0"),
        (Work(link_bytes=1), {"pcie_width_max": Unavailable("no NVML")}, "no NVML"),
    ],
)
def test_limit_with_unknown_fact_is_unavailable(
    work: Work, changes: dict[str, Field], reason: str
) -> None:
    bound = limit(work, {**H200_FIELDS, **changes}, NOT_MEASURED)

    assert isinstance(bound, Unavailable)
    assert reason in bound.reason


def test_copy_over_link_has_peak_if_memory_bandwidth_is_unknown() -> None:
    unknown_width = {"global_memory_bus_width_bits": Unavailable("MIG")}
    bound = limit_of(Work(bytes_moved=2**20, link_bytes=2**20), **unknown_width)

    assert bound.bound == "link"
    assert isinstance(bound.bytes_per_s, Unavailable)


def test_fp64_gemm_uses_tensor_cores_if_available() -> None:
    assert matrix_kind("fp64", {"compute_capability": "9.0"}) == "fp64_tensor"
    assert matrix_kind("fp64", {"compute_capability": "8.9"}) == "fp64"
    assert matrix_kind("fp8_e5m2", {"compute_capability": "9.0"}) == "fp8"


def test_geforce_has_half_the_rate_of_fp32_accumulation_but_not_of_integers() -> None:
    geforce = device("NVIDIA GeForce RTX 4090", "8.9", 128, 2520)
    professional = {**geforce, "name": "NVIDIA L40S"}

    assert 2 * int(str(rate_per_clock("fp16", geforce))) == rate_per_clock("fp16", professional)
    assert rate_per_clock("int8", geforce) == rate_per_clock("int8", professional)


# GB/s to other devices in one direction: half of the rates in the datasheets, which are for both directions.
@pytest.mark.parametrize(
    ("count", "version", "datasheet_rate"),
    [(4, "1.0", 80), (6, "2.0", 150), (12, "3.0", 300), (18, "4.0", 450), (18, "5.0", 900)],
)
def test_peer_copy_is_bound_by_nvlinks(count: int, version: str, datasheet_rate: int) -> None:
    work = Work(bytes_moved=2**30, link_bytes=2**30, link="peer")
    bound = limit_of(work, nvlink_count=count, nvlink_version=version)

    assert bound.bound == "link"
    assert bound.datasheet_s == pytest.approx(2**30 / (datasheet_rate * 1e9))


def test_peer_copy_without_nvlinks_is_bound_by_pcie() -> None:
    unsupported = Unavailable("not supported by this device")

    assert peer_bandwidth({**H200_FIELDS, "nvlink_count": 0}) == link_bandwidth(H200_FIELDS)
    for fields, reason in (
        ({"nvlink_count": unsupported}, "not supported"),
        ({"nvlink_count": 18, "nvlink_version": "9.0"}, "NVLink 9.0"),
        ({"nvlink_count": 18, "nvlink_version": unsupported}, "NVLink"),
        ({}, "NVML did not report it"),
    ):
        bound = peer_bandwidth({**H200_FIELDS, **fields})
        assert isinstance(bound, Unavailable)
        assert reason in bound.reason


works = st.builds(
    Work,
    operations=st.floats(1, 1e18),
    kind=st.sampled_from(["fp64", "fp32", "tf32", "bf16", "fp8", "int8"]),
    bytes_moved=st.floats(0, 1e13),
    link_bytes=st.floats(0, 1e12),
)


@given(works, st.floats(1.0, 10.0), st.floats(1e8, 3e9))
def test_bound_grows_with_operations_and_doubles_with_all_work(
    work: Work, factor: float, clock_hz: float
) -> None:
    single = limit_of(work, clock_hz)
    more_operations = limit_of(replace(work, operations=work.operations * factor), clock_hz)
    double = Work(2 * work.operations, work.kind, 2 * work.bytes_moved, 2 * work.link_bytes)

    assert more_operations.seconds >= single.seconds
    assert limit_of(double, clock_hz).seconds == pytest.approx(2 * single.seconds)


@given(works, st.floats(1e8, 3e9), st.floats(1.0, 10.0))
def test_limit_decreases_with_clock(work: Work, clock_hz: float, factor: float) -> None:
    assert limit_of(work, clock_hz * factor).seconds <= limit_of(work, clock_hz).seconds
