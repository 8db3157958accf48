""""""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.spoiled_blas import Run, Spoil, Spoiled
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.case import Rule, Verification, check_fit
from cudakit.bench.gemm import (
    FILLS,
    PRESETS,
    GemmSpec,
    GemmWorkload,
    Shape,
    default_shapes,
    describe_algorithm,
    parse_shape,
    preset,
    read_shapes,
)
from cudakit.bench.pipeline import run
from cudakit.bench.result import BenchResult, CaseResult
from cudakit.bench.roofline import Limit, Work
from cudakit.errors import InputError, Unsupported
from cudakit.gpu.api import Gpu, Ptr
from cudakit.gpu.api.gemm import DATA_TYPES, LAYOUTS, Algorithm, Gemm, GemmSettings
from cudakit.gpu.open import open_gpu
from cudakit.gpu.sim import Sim
from cudakit.units import Unavailable

SMALL = Gemm(dtype="bf16", m=48, n=32, k=64)


def spec(*gemms: Gemm, **options: Any) -> GemmSpec:
    return GemmSpec(
        gemms=gemms or (SMALL,), **{"mode": "isolated", "cache": "hot", "warmup_s": 0.0, **options}
    )


def results(gpu: Gpu, *gemms: Gemm, **options: Any) -> tuple[CaseResult, ...]:
    return run(spec(*gemms, **options), gpu).results


def verified(case: CaseResult) -> Verification:
    assert isinstance(case.verification, Verification)
    return case.verification


# --- measured GEMMs


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_every_data_type_is_measured_verified_and_frees_memory(dtype: str) -> None:
    with closing(Sim()) as gpu:
        free_bytes = gpu.memory_info().free_bytes
        (case,) = results(gpu, replace(SMALL, dtype=dtype, output="", accumulate=""))

        assert case.verified
        assert case.operations == 2 * 48 * 32 * 64
        assert case.operation == ("OP" if dtype == "int8" else "FLOP")
        assert isinstance(case.limit, Limit)
        assert gpu.memory_info().free_bytes == free_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fill", FILLS)
def test_every_layout_and_fill_is_verified_with_padding_batch_and_bias(
    layout: Any, fill: str
) -> None:
    gemm = Gemm(
        dtype="fp32", m=33, n=17, k=9, layout=layout, batch=5, padding=3, epilogue="relu-bias"
    )
    with closing(Sim()) as gpu:
        (case,) = results(gpu, gemm, fill=fill)

    assert case.verified
    assert case.method.fill == fill


def test_axes_omit_defaults() -> None:
    def axes(gemm: Gemm) -> list[str]:
        return [*GemmWorkload(gemm, GemmSettings(), "cublaslt", "uniform").axes]

    default_axes = ["dtype", "m", "n", "k", "layout"]
    assert axes(SMALL) == default_axes
    assert axes(replace(SMALL, batch=2, padding=8, epilogue="gelu", output="fp32")) == [
        *default_axes,
        "batch",
        "padding",
        "epilogue",
        "output",
    ]
    fp16 = Gemm(dtype="fp16", m=1, n=1, k=1, accumulate="fp16")
    assert axes(fp16) == [*default_axes, "accumulate"]


def test_rotated_buffer_sets_are_all_computed_and_verified() -> None:
    gemm = Gemm(dtype="fp32", m=256, n=256, k=256)
    with closing(Sim("jetson")) as gpu:
        (case,) = results(gpu, gemm, cache="rotate", rule=Rule(min_samples=1))

    assert case.verified
    assert case.method.buffer_sets > 8


def test_settings_record_library_and_algorithm() -> None:
    settings = GemmSettings(workspace_bytes=1 << 20, deterministic=True)
    with closing(Sim()) as gpu:
        (case,) = results(gpu, settings=settings, shapes={SMALL: "a layer"})

    assert case.settings["library"] == "cublaslt"
    assert case.settings["version"] == "simulated"
    assert case.settings["workspace_bytes"] == 1 << 20
    assert case.settings["asked"] == "deterministic"
    assert str(case.settings["algorithm"]).startswith("id ")
    assert case.settings["shape"] == "a layer"


def test_algorithm_of_spec_is_used() -> None:
    with closing(Sim()) as gpu:
        with closing(gpu.blas()) as blas:
            last = [*blas.algorithms(SMALL, GemmSettings())][-1]
        first, second = (
            results(gpu, **options)[0] for options in ({}, {"algorithms": {SMALL: last}})
        )

    assert second.settings["algorithm"] == describe_algorithm(last) != first.settings["algorithm"]


def test_algorithm_description_omits_zeros() -> None:
    assert describe_algorithm(Algorithm(id=66, tile=20, stages=0, split_k=3)) == (
        "id 66, tile 20, split-k 3"
    )


# --- wrong values


def spoil_first_element(run: Run) -> None:
    run.gpu.fill(run.at.d, 0x42, run.gemm.d.element.size_bytes, run.stream)


def spoil_last_element(run: Run) -> None:
    run.gpu.fill(run.last, 0x42, run.gemm.d.element.size_bytes, run.stream)


def leave_last_element_unwritten(run: Run) -> None:
    poison = 0x80 if run.gemm.d.element.is_integer else 0xFF
    run.gpu.fill(run.last, poison, run.gemm.d.element.size_bytes, run.stream)


def write_padding(run: Run) -> None:
    size = run.gemm.d.element.size_bytes
    run.gpu.fill(Ptr(run.at.d + run.gemm.m * size), 0, size, run.stream)


def clear_output(run: Run) -> None:
    run.gpu.fill(run.at.d, 0, run.gemm.d.size_bytes, run.stream)


def write_nan(run: Run) -> None:
    run.gpu.fill(run.at.d, 0x7F, run.gemm.d.element.size_bytes, run.stream)


def clear_output_of_later_runs(run: Run) -> None:
    if run.number > 3:
        clear_output(run)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp8_e4m3", "int8"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_first_element, "row 0, column 0 is"),
        (spoil_last_element, "row 47, column 31 is"),
        (leave_last_element_unwritten, "1 of 1536 values were never written"),
        (write_padding, "outside of D were overwritten"),
        (clear_output, ""),
        (clear_output_of_later_runs, ""),
    ],
)
def test_wrong_gemm_withholds_time(dtype: str, spoil: Spoil, words: str) -> None:
    gemm = Gemm(dtype=dtype, m=48, n=32, k=64, padding=16)
    with closing(Spoiled(spoil)) as gpu:
        (case,) = results(gpu, gemm)

    assert isinstance(case.median_s, Unavailable)
    assert not verified(case).passed
    # Integers have tolerance 0: the detail may be missing, because the error alone fails the verification.
    assert words in case.median_s.reason
    assert case.samples_s == ()


def test_nan_is_wrong() -> None:
    with closing(Spoiled(write_nan)) as gpu:
        (case,) = results(gpu, Gemm(dtype="fp8_e4m3", m=48, n=32, k=64, output="fp8_e4m3"))

    assert isinstance(case.median_s, Unavailable)


def test_wrong_value_among_zeros_is_found() -> None:
    with closing(Spoiled(spoil_first_element)) as gpu:
        (case,) = results(gpu, fill="zeros")

    assert isinstance(case.median_s, Unavailable)


def test_one_wrong_buffer_set_is_found() -> None:
    outputs: list[Ptr] = []

    def spoil_third_set(run: Run) -> None:
        outputs.extend({run.at.d} - set(outputs))
        if len(outputs) > 2 and run.at.d == outputs[2]:
            clear_output(run)

    gemm = Gemm(dtype="fp32", m=256, n=256, k=128)
    with closing(Spoiled(spoil_third_set, model="jetson")) as gpu:
        (case,) = results(gpu, gemm, cache="rotate")

    assert len(outputs) > 8
    assert isinstance(case.median_s, Unavailable)


def test_wrong_matrix_of_batch_is_found() -> None:
    gemm = replace(SMALL, batch=3)
    with closing(Spoiled(spoil_last_element)) as gpu:
        (case,) = results(gpu, gemm)

    assert isinstance(case.median_s, Unavailable)


# --- baselines and unsupported GEMMs


def test_baseline_is_interleaved_with_equal_data_in_own_buffers() -> None:
    operand_addresses: set[Ptr] = set()
    with closing(Spoiled(lambda run: operand_addresses.add(run.at.a))) as gpu:
        cudakit_case, baseline_case = results(gpu, baselines=("cublas",))
        assert gpu.opened == ["cublaslt", "cublas"]

    assert (cudakit_case.library, baseline_case.library) == ("cudakit", "cublas")
    assert (cudakit_case.name, cudakit_case.axes) == (baseline_case.name, baseline_case.axes)
    assert (
        cudakit_case.method.interleaved == baseline_case.method.interleaved == ("cudakit", "cublas")
    )
    assert len(cudakit_case.samples_s) == len(baseline_case.samples_s)
    assert baseline_case.settings["library"] == "cublas"
    assert verified(cudakit_case).error == verified(baseline_case).error
    assert len(operand_addresses) == 2


def test_gemm_unsupported_by_one_library_has_reason() -> None:
    with closing(Spoiled(unsupported=["cublas"])) as gpu:
        free_bytes = gpu.memory_info().free_bytes
        cudakit_case, baseline_case = results(gpu, baselines=("cublas",))
        assert gpu.memory_info().free_bytes == free_bytes

    assert cudakit_case.verified
    assert cudakit_case.method.interleaved == ()
    reason = Unavailable("cublas is not available")
    figures = (
        baseline_case.median_s,
        baseline_case.ci95_s,
        baseline_case.ratio_to_limit,
        baseline_case.statistics,
        baseline_case.limit,
    )
    assert set(figures) == {reason}
    assert baseline_case.verification == reason
    assert baseline_case.settings["library"] == "cublas"


def test_gemm_that_first_execution_rejects_is_unsupported() -> None:
    def refuse(run: Run) -> None:
        if run.gemm.dtype == "fp64":
            raise Unsupported("no fp64 today", hint="choose another")

    with closing(Spoiled(refuse)) as gpu:
        free_bytes = gpu.memory_info().free_bytes
        unsupported_case, supported_case = results(gpu, Gemm(dtype="fp64", m=8, n=8, k=8), SMALL)
        assert gpu.memory_info().free_bytes == free_bytes

    assert unsupported_case.median_s == Unavailable("no fp64 today")
    assert supported_case.verified


def test_baseline_that_cannot_be_captured_is_unsupported() -> None:
    def refuse(run: Run) -> None:
        if run.library == "cublas" and run.captured:
            raise Unsupported("no captures", hint="choose another")

    with closing(Spoiled(refuse)) as gpu:
        cudakit_case, baseline_case = results(gpu, mode="graph", baselines=("cublas",))

    assert cudakit_case.verified
    assert cudakit_case.method.interleaved == ()
    assert baseline_case.median_s == Unavailable("no captures")


def test_supported_gemms_are_measured_beside_unsupported_ones() -> None:
    with closing(Spoiled(unsupported=["fp64"])) as gpu:
        result = run(spec(Gemm(dtype="fp64", m=8, n=8, k=8), SMALL), gpu)

    assert [isinstance(case.median_s, float) for case in result.results] == [False, True]
    assert result.complete


def test_unsupported_is_raised_if_no_library_supports_gemm() -> None:
    with closing(Spoiled(unsupported=["bf16"])) as gpu:
        with pytest.raises(Unsupported, match="bf16 is not available") as error:
            results(gpu, baselines=("cublas",))
        assert error.value.hint == "choose another"


# --- cases


def cases(gpu: Gpu, *gemms: Gemm, **options: Any) -> Iterator[Any]:
    yield from spec(*gemms, **options).cases(gpu)


HUGE_GEMM = Gemm(dtype="fp64", m=200_000, n=100_000, k=100_000)


class PlannedAsReal(Sim):
    """A simulated device whose cases are planned as those of a real one."""

    @property
    def simulated(self) -> bool:
        return False


def test_gemm_larger_than_simulated_memory_names_the_limit_of_the_simulation() -> None:
    with closing(Sim()) as gpu, pytest.raises(InputError, match="is free") as error:
        results(gpu, HUGE_GEMM)

    assert error.value.hint == "a shape of 2048 would fit"


def test_gemm_larger_than_memory_names_largest_shape() -> None:
    with closing(PlannedAsReal()) as gpu:
        free_bytes = gpu.memory_info().free_bytes
        with pytest.raises(InputError, match=r" 200000×100000×100000 .* is free") as error:
            check_fit([*cases(gpu, HUGE_GEMM, baselines=("cublas",))], free_bytes)
        words, edge = error.value.hint.split()[:3], int(error.value.hint.split()[3])

        assert words == ["a", "shape", "of"]
        fitting = Gemm(dtype="fp64", m=edge, n=edge, k=edge)
        check_fit([*cases(gpu, fitting, baselines=("cublas",))], free_bytes)
        larger = replace(fitting, m=edge + 512, n=edge + 512, k=edge + 512)
        with pytest.raises(InputError):
            check_fit([*cases(gpu, larger, baselines=("cublas",))], free_bytes)


def test_each_library_needs_buffers_and_workspace() -> None:
    with closing(Sim()) as gpu:
        (alone,), (compared,) = (
            [*cases(gpu, baselines=baselines)] for baselines in ((), ("cublas", "torch"))
        )

    assert alone.needed_bytes == 2 * (48 * 64 + 64 * 32 + 48 * 32) + GemmSettings().workspace_bytes
    assert compared.needed_bytes == 3 * alone.needed_bytes


def test_smaller_batch_is_suggested_if_no_shape_fits() -> None:
    with closing(Sim()) as gpu, pytest.raises(InputError) as error:
        results(gpu, replace(SMALL, batch=10**12))

    assert error.value.hint.startswith("a smaller --batch")


def test_work_has_fastest_kind_of_arithmetic() -> None:
    fp64, fp8 = (Gemm(dtype=dtype, m=64, n=64, k=64, padding=16) for dtype in ("fp64", "fp8_e5m2"))
    with closing(Sim()) as gpu:
        work = [case.work for case in cases(gpu, fp64, fp8, cache="flush")]

    assert work == [
        Work(2 * 64**3, "fp64_tensor", 3 * 8 * 64**2),
        Work(2 * 64**3, "fp8", (1 + 1 + 2) * 64**2),
    ]


def test_gemm_in_the_cache_has_the_peak_of_arithmetic_alone() -> None:
    with closing(Sim()) as gpu:
        (case,) = cases(gpu, Gemm(dtype="bf16", m=64, n=64, k=64), cache="hot")

    assert case.work == Work(2 * 64**3, "bf16", 0)


def test_default_minimum_time_is_longer_for_gemms() -> None:
    with closing(Sim()) as gpu:
        (default_axes,) = cases(gpu)
        (short,) = cases(gpu, rule=Rule(timeout_s=2.0))
        (requested_case,) = cases(gpu, rule=Rule(min_time_s=0.1))

    assert (default_axes.method.rounds, default_axes.method.rule.min_time_s) == (5, 2.0)
    assert short.method.rule.min_time_s == 1.0
    assert requested_case.method.rule.min_time_s == 0.1


def test_seed_reproduces_gemm_result() -> None:
    def run_with_seed(seed: int) -> BenchResult:
        with closing(Sim()) as gpu:
            return run(spec(SMALL, seed=seed), gpu, now_ns=lambda: 0)

    assert run_with_seed(3) == run_with_seed(3)
    assert run_with_seed(3).results[0].verification != run_with_seed(4).results[0].verification


# --- on a device


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DATA_TYPES)
@pytest.mark.parametrize("edge", [256, 4096])
def test_gemm_of_every_type_is_within_tolerance(dtype: str, edge: int) -> None:
    pytest.importorskip("nvmath")
    gemm = Gemm(dtype=dtype, m=edge, n=edge, k=edge)
    rule = Rule(min_samples=2, min_time_s=0.01, timeout_s=0.5)
    with closing(open_gpu("cuda")) as gpu:
        (case,) = results(gpu, gemm, mode="batch", cache="rotate", rule=rule)

    check = verified(case)
    assert check.passed, check
    # A tolerance that is far too wide would accept wrong values. An fp64 GEMM may have no error at all.
    assert check.error > check.tolerance / 1000 or check.tolerance == 0 or dtype == "fp64"


dimensions = st.integers(1, 10**9)


@given(dimensions, dimensions, dimensions)
def test_shape_text_is_parsed(m: int, n: int, k: int) -> None:
    assert parse_shape(f"{m}x{n}x{k}") == Shape(m, n, k)
    assert parse_shape(str(m)) == Shape(m, m, m)


@pytest.mark.parametrize(
    "text", ["", "x", "4x4", "4x4x4x4", "-4", "4.0", "4e3", "1 2 3", "4X4Xq", "٤"]
)
def test_invalid_shape_error_has_hint(text: str) -> None:
    with pytest.raises(InputError, match="is not a shape") as error:
        parse_shape(text)
    assert "4096x1024x8192" in error.value.hint


@pytest.mark.parametrize("text", ["0", "4x0x4"])
def test_dimension_of_0_is_rejected(text: str) -> None:
    with pytest.raises(InputError, match=f"'{text}' has a dimension of 0"):
        parse_shape(text)


def test_every_preset_has_shapes_and_model_presets_have_names() -> None:
    for name in PRESETS:
        shapes = preset(name)
        assert len(shapes) == len(set(shapes)) > 3
        assert all(shape.name for shape in shapes) == (name != "cubes")
    with pytest.raises(InputError, match="unknown preset 'gpt5'") as error:
        preset("gpt5")
    assert "llama3-8b" in error.value.hint


def test_cubes_are_powers_of_two_from_512_to_16384() -> None:
    assert [shape.m for shape in preset("cubes")] == [512, 1024, 2048, 4096, 8192, 16384]


def test_preset_layers_match_paper() -> None:
    by_name = {shape.name: (shape.m, shape.n, shape.k) for shape in preset("llama3-8b")}

    assert by_name["llama3-8b qkv, 4096 tokens"] == (6144, 4096, 4096)
    assert by_name["llama3-8b gate and up, 16 tokens"] == (28672, 16, 4096)
    assert by_name["llama3-8b down, 4096 tokens"] == (4096, 4096, 14336)
    # GPT-3 has 96 heads of size 128, keys and values for each head, and no gate.
    assert any(
        (shape.m, shape.k) == (36864, 12288) and "qkv" in shape.name
        for shape in preset("gpt3-175b")
    )
    assert not any("gate" in shape.name for shape in preset("gpt3-175b"))


def test_default_shapes_of_simulated_device_are_smaller() -> None:
    simulated, real = (default_shapes(simulated=is_simulated) for is_simulated in (True, False))

    assert max(shape.m for shape in simulated) < min(shape.m for shape in real)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 2 3\n", [Shape(1, 2, 3)]),
        ("1,2,3\n4, 5 ,6,7\n", [Shape(1, 2, 3), Shape(4, 5, 6, 7)]),
        ("# of a model\n\n  1\t2   3 # qkv\r\n", [Shape(1, 2, 3)]),
        ("m,n,k\n1,2,3\n", [Shape(1, 2, 3)]),
        ("batch;K;N;M;what\n4;3;2;1;qkv\n", [Shape(1, 2, 3, 4)]),
        ("\ufeffm n k batch\n1 2 3 4\n", [Shape(1, 2, 3, 4)]),
    ],
)
def test_file_has_one_shape_per_line(text: str, expected: list[Shape], tmp_path: Path) -> None:
    file = tmp_path / "shapes.txt"
    file.write_text(text, encoding="utf-8")

    assert list(read_shapes(file)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2 3\n\n1 2\n", ":3: '1 2' is not a shape"),
        ("1 2 3 4 5\n", ":1: '1 2 3 4 5' is not a shape"),
        ("1 2 3\n1 -2 3\n", ":2: '1 -2 3' is not a shape"),
        ("1 2 0\n", ":1: '1 2 0' has a dimension of 0"),
        ("m,n,k,batch\n1,2,3\n", ":2: '1,2,3' is not a shape"),
        ("m,n\n1,2\n", ":1: 'm,n' is not a shape, and as a header it lacks k"),
        ("m,n,k,k\n1,2,3,3\n", "it lacks k"),
        ("", "is empty"),
        ("# nothing\n", "contains no shapes"),
        ("m n k\n", "contains no shapes"),
    ],
)
def test_invalid_line_of_shapes_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "shapes.txt"
    file.write_text(text)

    with pytest.raises(InputError, match=message) as error:
        read_shapes(file)
    assert str(file) in error.value.message


def test_unreadable_file_error_names_file(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(InputError, match="missing does not exist"):
        read_shapes(tmp_path / "missing")
    with pytest.raises(InputError, match="is a directory"):
        read_shapes(tmp_path)
    with pytest.raises(InputError, match="it is not text"):
        read_shapes(binary)
