"""Calls of cuBLASLt, recorded by fake bindings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import product

import pytest
from gpu.blas.fake_cublas import DATA_TYPES, Device, FakeLt, Places, vendor
from hypothesis import given
from hypothesis import strategies as st

from cudakit.errors import CudaError, Unsupported
from cudakit.gpu.api import LEGACY, Ptr
from cudakit.gpu.api.facts import Capability
from cudakit.gpu.api.gemm import Algorithm, BindableGemmPlan, Gemm, GemmSettings
from cudakit.gpu.blas.cublaslt import Choices, CublasLt, configurations, round_robin
from cudakit.gpu.blas.descriptors import (
    IN_COMPUTE_TYPE,
    IN_OUTPUT_TYPE,
    SCHEMES,
    allowed_reductions,
)

HOPPER = Capability(9, 0)
GEMM = Gemm(dtype="bf16", m=64, n=32, k=16)
USUAL = GemmSettings()


@pytest.fixture
def device() -> Iterator[Device]:
    with closing(Device()) as device:
        yield device


def _opened(device: Device, lt: FakeLt) -> CublasLt:
    return CublasLt(device, vendor(lt), HOPPER)


def test_version_is_that_of_library(device: Device) -> None:
    assert _opened(device, FakeLt()).version == "13.10.0"


def test_descriptors_match_gemm(device: Device) -> None:
    lt = FakeLt()
    gemm = replace(GEMM, layout="nt", batch=3, padding=8)
    product = _opened(device, lt).prepare(gemm, USUAL)
    product.enqueue(Places(), LEGACY)
    _, operation, _, a, a_layout, b, b_layout, _, c, c_layout, d, d_layout, *rest = lt.products[0]
    assert (a, b, c, d) == (0x100, 0x200, 0x300, 0x300)
    assert lt.alive[operation]["TRANSA"] == 0
    assert lt.alive[operation]["TRANSB"] == 1
    assert lt.alive[a_layout] == {
        "type": DATA_TYPES["CUDA_R_16BF"],
        "rows": 64,
        "columns": 16,
        "leading": 72,
        "BATCH_COUNT": 3,
        "STRIDED_BATCH_OFFSET": 72 * 16,
    }
    assert (lt.alive[b_layout]["rows"], lt.alive[b_layout]["columns"]) == (32, 16)
    assert lt.alive[d_layout] == lt.alive[c_layout]
    assert rest[-2] == 0x1000 + LEGACY


def test_bound_gemm_without_the_address_of_cublaslt_calls_the_bindings(device: Device) -> None:
    lt = FakeLt()
    plan = _opened(device, lt).prepare(GEMM, USUAL)
    plan.enqueue(Places(), LEGACY)

    assert isinstance(plan, BindableGemmPlan)
    plan.bind(Places())(LEGACY)

    assert lt.products[1] == lt.products[0]


def test_bias_address_is_set_per_call(device: Device) -> None:
    lt = FakeLt()
    product = _opened(device, lt).prepare(replace(GEMM, epilogue="gelu-bias"), USUAL)
    for bias in (0x400, 0x400, 0x800):
        product.enqueue(Places(bias=bias), LEGACY)
    assert [call[-1] for call in lt.products] == [0x400, 0x400, 0x800]
    operation = lt.alive[lt.products[0][1]]
    assert operation["EPILOGUE"] == lt.Epilogue.GELU_BIAS
    assert operation["BIAS_DATA_TYPE"] == DATA_TYPES["CUDA_R_16BF"]


def test_fp8_uses_unit_scales_and_no_c(device: Device) -> None:
    lt = FakeLt()
    gemm = Gemm(dtype="fp8_e5m2", m=16, n=16, k=16, output="fp8_e5m2")
    blas = _opened(device, lt)
    blas.prepare(gemm, GemmSettings(fast_accumulate=True)).enqueue(Places(), LEGACY)
    _, operation, _, _, a_layout, _, b_layout, _, c, c_layout, *_ = lt.products[0]
    attributes = lt.alive[operation]
    assert c == 0
    assert lt.alive[c_layout]["type"] == DATA_TYPES["CUDA_R_16BF"]
    assert lt.alive[a_layout]["type"] == DATA_TYPES["CUDA_R_8F_E5M2"]
    assert lt.alive[b_layout]["type"] == DATA_TYPES["CUDA_R_8F_E4M3"]
    assert (
        attributes["A_SCALE_POINTER"]
        == attributes["B_SCALE_POINTER"]
        == attributes["D_SCALE_POINTER"]
    )
    assert attributes["FAST_ACCUM"] == 1
    scale = Ptr(attributes["A_SCALE_POINTER"])
    pinned = device.host_malloc(4)
    device.copy(pinned, scale, 4, LEGACY)
    device.sync()
    assert bytes(device.host_view(pinned, 4)) == b"\x00\x00\x80\x3f"


def test_workspace_is_allocated_once_and_freed(device: Device) -> None:
    lt = FakeLt(lambda _: 4096)
    blas = _opened(device, lt)
    product = blas.prepare(GEMM, USUAL)
    free = device.memory_info().free_bytes
    for _ in range(3):
        product.enqueue(Places(), LEGACY)
    assert device.memory_info().free_bytes == free
    assert {call[-3] for call in lt.products} == {4096}
    assert "4.00 KiB used" in product.settings["workspace"]
    product.close()
    product.close()
    assert device.memory_info().free_bytes > free


def test_close_destroys_all_descriptors(device: Device) -> None:
    lt = FakeLt()
    with closing(_opened(device, lt)) as blas:
        blas.prepare(GEMM, USUAL).close()
        blas.heuristics(GEMM, USUAL, 8)
        list(blas.algorithms(GEMM, USUAL))
    assert lt.alive == {}


def test_closed_library_is_refused(device: Device) -> None:
    blas = _opened(device, FakeLt())
    product = blas.prepare(GEMM, USUAL)
    blas.close()
    blas.close()
    for method in (
        lambda: blas.prepare(GEMM, USUAL),
        lambda: product.enqueue(Places(), LEGACY),
    ):
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
            method()


def test_default_algorithm_is_first_of_heuristics(device: Device) -> None:
    lt = FakeLt(lambda attributes: attributes["tile"] * 256)
    blas = _opened(device, lt)
    proposed = blas.heuristics(GEMM, USUAL, 8)
    assert [proposal.id for proposal in proposed] == [66, 67]
    assert proposed[0] == Algorithm(id=66, tile=20, workspace_bytes=20 * 256)
    product = blas.prepare(GEMM, USUAL)
    assert product.algorithm == proposed[0]
    assert "heuristics" in product.settings["chosen_by"]


def test_heuristics_use_settings(device: Device) -> None:
    lt = FakeLt()
    set_limits: list[dict[str, int]] = []
    destroy = lt.matmul_preference_destroy
    lt.matmul_preference_destroy = lambda number: (
        set_limits.append(lt.alive[number]),
        destroy(number),
    )
    blas = _opened(device, lt)
    blas.heuristics(GEMM, GemmSettings(workspace_bytes=4096, deterministic=True), 1)
    blas.heuristics(GEMM, GemmSettings(reduced_precision=False), 1)
    assert [proposal["REDUCTION_SCHEME_MASK"] for proposal in set_limits] == [2 | 4, 2]
    assert set_limits[0]["MAX_WORKSPACE_BYTES"] == 4096
    assert set_limits[0]["MIN_ALIGNMENT_D_BYTES"] == 256


def test_every_yielded_algorithm_can_be_selected(device: Device) -> None:
    lt = FakeLt(
        lambda attributes: 256 * attributes["split_k"] if attributes["cluster"] in (0, 2) else None
    )
    blas = _opened(device, lt)
    algorithms = list(blas.algorithms(GEMM, USUAL))
    assert len(algorithms) == len(set(algorithms))
    assert {proposal.id for proposal in algorithms} == {66, 67}
    assert {proposal.cluster for proposal in algorithms} == {0, 2}
    assert {proposal.split_k for proposal in algorithms} > {1, 2, 16}
    for algorithm in algorithms:
        with closing(blas.prepare(GEMM, USUAL, algorithm)) as product:
            assert product.algorithm == algorithm
    assert "user" in product.settings["chosen_by"]


def test_algorithms_beyond_workspace_limit_are_not_listed(device: Device) -> None:
    blas = _opened(device, FakeLt(lambda attributes: 256 * attributes["split_k"]))
    algorithms = list(blas.algorithms(GEMM, GemmSettings(workspace_bytes=1024)))
    assert max(proposal.workspace_bytes for proposal in algorithms) == 1024


def test_deterministic_gemm_rejects_in_place_reduction(device: Device) -> None:
    blas = _opened(device, FakeLt())
    settings = GemmSettings(deterministic=True)
    assert {proposal.reduction for proposal in blas.algorithms(GEMM, settings)} == {0, 2, 4}
    with pytest.raises(Unsupported, match="reduction scheme 1"):
        blas.prepare(GEMM, settings, Algorithm(id=66, split_k=2, reduction=1))


@pytest.mark.parametrize(
    "algorithm",
    [Algorithm(id=5), Algorithm(id=66, tile=3), Algorithm(id=66, cluster=1 << 20)],
    ids=["no such id", "refused", "too large a number"],
)
def test_unusable_algorithm_is_unsupported(device: Device, algorithm: Algorithm) -> None:
    lt = FakeLt(lambda attributes: None if attributes["tile"] == 3 else 0)
    with pytest.raises(Unsupported):
        _opened(device, lt).prepare(GEMM, USUAL, algorithm)
    assert len(lt.alive) == 1  # only the handle of the library is left


def test_error_without_algorithm_describes_gemm(device: Device) -> None:
    blas = _opened(device, FakeLt(lambda _: None))
    with pytest.raises(
        Unsupported, match=r"cuBLASLt 13.10.0 .* fp8_e4m3 .* layout tn.* 9\.0"
    ) as caught:
        blas.prepare(Gemm(dtype="fp8_e4m3", m=15, n=16, k=16), USUAL)
    assert "multiples of 16" in caught.value.hint


@pytest.mark.parametrize("layout", ["nn", "nt", "tt"])
def test_fp8_is_multiplied_along_k_only_before_blackwell(device: Device, layout: str) -> None:
    gemm = Gemm(dtype="fp8_e4m3", m=16, n=16, k=16, layout=layout)
    with pytest.raises(Unsupported, match="only layout tn"):
        _opened(device, FakeLt()).algorithms(gemm, USUAL)
    CublasLt(device, vendor(), Capability(10, 0)).prepare(gemm, USUAL)


def test_fp16_sums_are_stored_as_fp16(device: Device) -> None:
    gemm = Gemm(dtype="fp16", m=16, n=16, k=16, accumulate="fp16", output="fp32")
    with pytest.raises(Unsupported, match="needs output fp16"):
        _opened(device, FakeLt()).heuristics(gemm, USUAL, 1)


def test_failed_call_error_has_status_name(device: Device) -> None:
    lt = FakeLt()
    product = _opened(device, lt).prepare(GEMM, USUAL)

    def fail(*_: int) -> None:
        raise lt.cuBLASLtError(13)

    lt.matmul = fail
    other = _opened(device, lt).prepare(GEMM, USUAL)
    product.enqueue(Places(), LEGACY)
    with pytest.raises(CudaError, match="CUBLAS_STATUS_EXECUTION_FAILED: cublasLtMatmul failed"):
        other.enqueue(Places(), LEGACY)


# --- The configurations that the search tries and skips --------------------------------------------

EVERYTHING = Choices(
    id=66,
    tiles=(15, 20),
    stages=(1, 2),
    customs=range(2),
    swizzles=(0, 1),
    splits=(2, 4),
    reductions=(IN_COMPUTE_TYPE,),
    clusters=(0, 2, 3),
    inners=(0, 1),
)


def test_accepted_configurations_are_found_once() -> None:
    def accepts(candidate: Algorithm) -> Algorithm | None:
        is_supported = (
            candidate.cluster in (0, 3)
            and candidate.inner == 0
            and candidate.tile != candidate.stages + 14
        )
        return candidate if is_supported and candidate.custom + candidate.swizzle < 2 else None

    found_configurations = list(filter(None, configurations(EVERYTHING, accepts)))
    splits = [(1, 0), (2, IN_COMPUTE_TYPE), (4, IN_COMPUTE_TYPE)]
    expected = (
        Algorithm(
            id=66,
            tile=tile,
            stages=stages,
            custom=custom,
            swizzle=swizzle,
            cluster=cluster,
            split_k=split,
            reduction=reduction,
        )
        for tile, stages, custom, swizzle, cluster, (split, reduction) in product(
            (15, 20), (1, 2), (0, 1), (0, 1), (0, 3), splits
        )
    )
    assert len(found_configurations) == len(set(found_configurations))
    assert set(found_configurations) == set(filter(accepts, expected))


def test_parameter_without_effect_is_tried_once() -> None:
    found_configurations = list(
        filter(None, configurations(EVERYTHING, lambda candidate: candidate))
    )
    assert {configuration.cluster for configuration in found_configurations} == {0}
    assert {configuration.inner for configuration in found_configurations} == {0}


def test_nothing_is_found_where_everything_is_refused() -> None:
    assert list(filter(None, configurations(EVERYTHING, lambda _: None))) == []


def test_split_k_needs_reduction_scheme() -> None:
    choices = Choices(id=1, splits=(2, 3))
    assert list(filter(None, configurations(choices, lambda candidate: candidate))) == [
        Algorithm(id=1)
    ]


def test_search_tries_only_offered_values() -> None:
    candidate: list[Algorithm] = []

    def accepts(algorithm: Algorithm) -> Algorithm | None:
        candidate.append(algorithm)
        return algorithm if algorithm.cluster == 2 else None

    list(filter(None, configurations(EVERYTHING, accepts)))
    assert {configuration.tile for configuration in candidate} == {15, 20}
    assert {configuration.split_k for configuration in candidate} == {1, 2, 4}
    assert all(
        bool(configuration.reduction) == (configuration.split_k > 1) for configuration in candidate
    )


def test_round_robin_skips_empty_iterator_and_can_be_stopped() -> None:
    calls = iter(range(1000))
    failing = iter([None] * 10_000)
    found_configurations = round_robin(
        [failing, iter([Algorithm(id=1)] * 3)], lambda: next(calls) == 999
    )
    assert list(found_configurations) == [Algorithm(id=1)] * 3
    assert len(list(failing)) > 9_000


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4))
def test_round_robin_yields_first_of_each_before_second(
    numbers: list[list[int]],
) -> None:
    lists = [
        [Algorithm(id=index, tile=number) for number in values]
        for index, values in enumerate(numbers)
    ]
    found_configurations = list(round_robin(map(iter, lists)))
    assert sorted(found_configurations, key=repr) == sorted(sum(lists, []), key=repr)  # noqa: RUF017
    first_values = [values[0] for values in lists if values]
    assert found_configurations[: len(first_values)] == first_values


@pytest.mark.parametrize(
    ("dtype", "settings", "allowed"),
    [
        ("bf16", GemmSettings(), SCHEMES),
        ("bf16", GemmSettings(deterministic=True), (IN_COMPUTE_TYPE, IN_OUTPUT_TYPE)),
        ("bf16", GemmSettings(reduced_precision=False), (IN_COMPUTE_TYPE,)),
        ("fp32", GemmSettings(reduced_precision=False), SCHEMES),
        ("fp64", GemmSettings(deterministic=True, reduced_precision=False), (2, 4)),
    ],
)
def test_settings_select_reduction_schemes(
    dtype: str, settings: GemmSettings, allowed: tuple[int, ...]
) -> None:
    assert allowed_reductions(Gemm(dtype=dtype, m=8, n=8, k=8), settings) == allowed
