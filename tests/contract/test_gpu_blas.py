from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from contract.products import Problem, result, run, upload
from contract.workbench import Workbench

from cudakit.errors import MissingDependency, Unsupported
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.gemm import (
    DATA_TYPES,
    EPILOGUES,
    LAYOUTS,
    WORKSPACE_BYTES,
    Algorithm,
    Blas,
    Gemm,
    GemmSettings,
    Library,
)
from cudakit.units import Unavailable

DEFAULT_SETTINGS = GemmSettings(reduced_precision=False)
FP8 = ("fp8_e4m3", "fp8_e5m2")
# Minimum compute capability (cuBLAS Library, "cublasLtMatmul").
MIN_CAPABILITY = {"bf16": (8, 0), "tf32": (8, 0), "fp8_e4m3": (8, 9), "fp8_e5m2": (8, 9)}
BLACKWELL = (10, 0)


def make_gemm(dtype: str, **options: Any) -> Gemm:
    return Gemm(dtype=dtype, **{"m": 48, "n": 32, "k": 64, **options})


def opened(gpu: Gpu, library: Library = "cublaslt") -> Blas:
    try:
        return gpu.blas(library)
    except MissingDependency as error:
        pytest.skip(error.message)


def capability(gpu: Gpu) -> tuple[int, ...]:
    return tuple(int(part) for part in str(gpu.facts().fields["compute_capability"]).split("."))


@pytest.fixture
def blas(bench: Workbench) -> Iterator[Blas]:
    with closing(opened(bench.gpu)) as blas:
        yield blas


def assert_right(
    bench: Workbench,
    blas: Blas,
    gemm: Gemm,
    settings: GemmSettings = DEFAULT_SETTINGS,
    algorithm: Algorithm | None = None,
) -> None:
    """Compute a GEMM and check every byte of D; skip data types that the device lacks."""
    if capability(bench.gpu) < MIN_CAPABILITY.get(gemm.dtype, (0, 0)):
        pytest.skip(f"the device does not multiply {gemm.dtype}")
    problem = Problem(gemm)
    with closing(blas.prepare(gemm, settings, algorithm)) as plan:
        content = run(bench, plan, problem)
    problem.check(content, reduced=settings.reduced_precision)


def assert_right_or_refused(bench: Workbench, blas: Blas, gemm: Gemm) -> None:
    """Check the result of a GEMM, or that the library raises Unsupported with a reason."""
    try:
        blas.prepare(gemm, DEFAULT_SETTINGS).close()
    except Unsupported as refusal:
        pytest.skip(f"{refusal.message}; {refusal.hint}")
    assert_right(bench, blas, gemm)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [dtype for dtype in DATA_TYPES if dtype not in (*FP8, "int8")])
def test_gemm_is_correct_in_every_layout(
    bench: Workbench, blas: Blas, dtype: str, layout: str
) -> None:
    assert_right(bench, blas, make_gemm(dtype, layout=layout))


@pytest.mark.parametrize("dtype", [*FP8, "int8"])
def test_8_bit_gemm_is_correct(bench: Workbench, blas: Blas, dtype: str) -> None:
    assert_right(bench, blas, make_gemm(dtype, layout="tn"))


@pytest.mark.parametrize("layout", ["nn", "nt", "tt"])
def test_int8_in_each_layout_is_correct_or_refused(
    bench: Workbench, blas: Blas, layout: str
) -> None:
    assert_right_or_refused(bench, blas, make_gemm("int8", layout=layout))


@pytest.mark.parametrize(
    ("dtype", "output"),
    [(dtype, output.name) for dtype, kind in DATA_TYPES.items() for output in kind.outputs[1:]],
)
def test_gemm_output_may_be_of_another_type(
    bench: Workbench, blas: Blas, dtype: str, output: str
) -> None:
    assert_right(bench, blas, make_gemm(dtype, output=output))


def test_gemm_accumulates_in_fp16(bench: Workbench, blas: Blas) -> None:
    assert_right(bench, blas, make_gemm("fp16", accumulate="fp16"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
def test_gemm_sizes_may_be_odd(bench: Workbench, blas: Blas, dtype: str, layout: str) -> None:
    assert_right(bench, blas, Gemm(dtype=dtype, m=17, n=5, k=3, layout=layout))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_batched_gemm_does_not_write_padding(bench: Workbench, blas: Blas, dtype: str) -> None:
    assert_right(bench, blas, make_gemm(dtype, batch=3, padding=16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_ignored_in_every_layout(bench: Workbench, blas: Blas, layout: str) -> None:
    assert_right(bench, blas, make_gemm("fp32", layout=layout, batch=2, padding=5))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_epilogue_is_correct(bench: Workbench, blas: Blas, dtype: str, epilogue: str) -> None:
    assert_right(bench, blas, make_gemm(dtype, epilogue=epilogue))


@pytest.mark.parametrize("output", ["bf16", "fp16", "fp32"])
def test_bias_of_fp8_gemm_is_correct(bench: Workbench, blas: Blas, output: str) -> None:
    assert_right(bench, blas, make_gemm("fp8_e4m3", epilogue="bias", output=output))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", ["fp64", *FP8])
def test_each_epilogue_is_correct_or_refused(
    bench: Workbench, blas: Blas, dtype: str, epilogue: str
) -> None:
    assert_right_or_refused(bench, blas, make_gemm(dtype, epilogue=epilogue))


def test_bias_applies_to_every_matrix_of_batch(bench: Workbench, blas: Blas) -> None:
    assert_right(bench, blas, make_gemm("bf16", epilogue="relu-bias", batch=3, padding=8))


@pytest.mark.parametrize("dtype", [dtype for dtype in DATA_TYPES if dtype not in FP8])
def test_cublas_matches_cublaslt(bench: Workbench, dtype: str) -> None:
    with closing(opened(bench.gpu, "cublas")) as blas:
        assert_right(bench, blas, make_gemm(dtype, padding=16))
        assert_right(bench, blas, make_gemm(dtype, batch=3))


IMPOSSIBLE: dict[str, tuple[Library, Gemm]] = {
    "an epilogue of int8": ("cublaslt", make_gemm("int8", epilogue="bias")),
    "sums in fp16 of an output in fp32": (
        "cublaslt",
        make_gemm("fp16", accumulate="fp16", output="fp32"),
    ),
    "columns of fp8 that are not aligned": ("cublaslt", make_gemm("fp8_e4m3", k=65)),
    "fp8 in cublas": ("cublas", make_gemm("fp8_e4m3")),
    "an epilogue in cublas": ("cublas", make_gemm("fp32", epilogue="relu")),
}


@pytest.mark.parametrize(("library", "gemm"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_unsupported_gemm_is_refused_with_reason(
    bench: Workbench, library: Library, gemm: Gemm
) -> None:
    with closing(opened(bench.gpu, library)) as blas, pytest.raises(Unsupported) as caught:
        blas.prepare(gemm, DEFAULT_SETTINGS)
    assert caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("layout", ["nn", "nt", "tt"])
def test_fp8_needs_layout_tn_before_blackwell(bench: Workbench, blas: Blas, layout: str) -> None:
    if capability(bench.gpu) >= BLACKWELL:
        pytest.skip("this device multiplies fp8 in every layout")
    with pytest.raises(Unsupported) as caught:
        blas.prepare(make_gemm("fp8_e4m3", layout=layout), DEFAULT_SETTINGS)
    assert caught.value.message
    assert caught.value.hint


def test_gemm_is_stream_ordered(bench: Workbench, blas: Blas) -> None:
    gpu, gemm = bench.gpu, make_gemm("fp32")
    first_problem, second_problem = Problem(gemm, seed=1), Problem(gemm, seed=2)
    stream, early_operands, late_operands = (
        gpu.stream(blocking=False),
        upload(bench, second_problem),
        upload(bench, first_problem),
    )
    with closing(blas.prepare(gemm, DEFAULT_SETTINGS)) as plan:
        bench.spin(stream)
        gpu.copy(early_operands.a, late_operands.a, first_problem.a.nbytes, stream)
        gpu.copy(early_operands.b, late_operands.b, first_problem.b.nbytes, stream)
        plan.enqueue(early_operands, stream)
        first_problem.check(result(bench, first_problem, early_operands))


def test_captured_gemm_is_computed_by_every_replay(bench: Workbench, blas: Blas) -> None:
    gpu, gemm = bench.gpu, make_gemm("bf16", epilogue="bias")
    problems = [Problem(gemm, seed=seed) for seed in range(3)]
    stream, operands = gpu.stream(), upload(bench, problems[0])
    with closing(blas.prepare(gemm, DEFAULT_SETTINGS)) as plan:
        gpu.capture_begin(stream)
        plan.enqueue(operands, stream)
        graph = gpu.instantiate(gpu.capture_end(stream))
        untouched = result(bench, problems[0], operands)
        for problem in problems:
            for ptr, bits in (
                (operands.a, problem.a),
                (operands.b, problem.b),
                (operands.bias, problem.bias),
            ):
                bench.write(ptr, bits)
            gpu.graph_launch(graph, stream)
            problem.check(result(bench, problem, operands))
    assert len(set(untouched)) == 1


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_heuristic_algorithms_are_correct(bench: Workbench, blas: Blas, dtype: str) -> None:
    gemm, settings = make_gemm(dtype, k=512), GemmSettings()
    algorithms = blas.heuristics(gemm, settings, 8)

    assert 1 <= len(algorithms) <= 8
    for algorithm in algorithms:
        assert_right(bench, blas, gemm, settings, algorithm)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_listed_algorithms_are_correct(bench: Workbench, blas: Blas, dtype: str) -> None:
    gemm, settings = make_gemm(dtype, k=512), GemmSettings()
    algorithms = list(islice(blas.algorithms(gemm, settings), 20))

    assert algorithms
    assert len(set(algorithms)) == len(algorithms)
    for algorithm in algorithms:
        assert_right(bench, blas, gemm, settings, algorithm)


def test_gemm_reports_chosen_algorithm(blas: Blas) -> None:
    gemm = make_gemm("fp32", k=512)
    for algorithm in blas.heuristics(gemm, DEFAULT_SETTINGS, 3):
        with closing(blas.prepare(gemm, DEFAULT_SETTINGS, algorithm)) as plan:
            planned = plan.algorithm
            assert isinstance(planned, Algorithm)
            assert replace(planned, workspace_bytes=algorithm.workspace_bytes) == algorithm


def test_zero_workspace_excludes_algorithms_that_need_one(bench: Workbench, blas: Blas) -> None:
    gemm, settings = make_gemm("fp32", k=4096), GemmSettings(workspace_bytes=0)

    for algorithm in islice(blas.algorithms(gemm, settings), 20):
        assert algorithm.workspace_bytes == 0
    assert_right(bench, blas, gemm, settings)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_deterministic_gemm_is_bitwise_reproducible(
    bench: Workbench, blas: Blas, dtype: str
) -> None:
    gemm, settings = make_gemm(dtype, k=4096), GemmSettings(deterministic=True)
    problem = Problem(gemm)
    with closing(blas.prepare(gemm, settings)) as plan:
        runs = {run(bench, plan, problem) for _ in range(5)}

    assert len(runs) == 1
    problem.check(runs.pop(), reduced=True)


@pytest.mark.parametrize("library", ["cublaslt", "cublas"])
def test_gemm_reports_settings(bench: Workbench, library: Library) -> None:
    with closing(opened(bench.gpu, library)) as blas:
        assert blas.library == library
        assert blas.version
        with closing(blas.prepare(make_gemm("fp32"), DEFAULT_SETTINGS)) as plan:
            assert isinstance(plan.algorithm, Algorithm | Unavailable)
            assert plan.settings
            assert all(plan.settings.values())


def test_second_close_has_no_effect(bench: Workbench) -> None:
    blas = opened(bench.gpu)
    plan = blas.prepare(make_gemm("fp32", k=4096), DEFAULT_SETTINGS)
    for _ in range(2):
        plan.close()
    for _ in range(2):
        blas.close()
    bench.gpu.sync()


def test_closed_gemm_frees_workspace(bench: Workbench, blas: Blas) -> None:
    gemm = make_gemm("fp32", k=1 << 15)
    plan = blas.prepare(gemm, DEFAULT_SETTINGS)
    run(bench, plan, Problem(gemm))
    plan.close()  # after the first GEMM, the library makes no more one-time allocations
    free_bytes_before = bench.gpu.memory_info().free_bytes
    for _ in range(16):
        blas.prepare(gemm, DEFAULT_SETTINGS).close()
    assert free_bytes_before - bench.gpu.memory_info().free_bytes < 2 * WORKSPACE_BYTES


def test_several_gemms_share_library(bench: Workbench, blas: Blas) -> None:
    first, second = Problem(make_gemm("fp32", k=4096)), Problem(make_gemm("fp64", n=16), seed=1)
    with (
        closing(blas.prepare(first.gemm, DEFAULT_SETTINGS)) as first_plan,
        closing(blas.prepare(second.gemm, DEFAULT_SETTINGS)) as second_plan,
    ):
        for _ in range(2):
            first.check(run(bench, first_plan, first))
            second.check(run(bench, second_plan, second))


def test_unused_operands_may_be_null(bench: Workbench, blas: Blas) -> None:
    problem = Problem(make_gemm("fp32"))
    operands = upload(bench, problem)
    bench.gpu.free(operands.bias)
    with closing(blas.prepare(problem.gemm, DEFAULT_SETTINGS)) as plan:
        plan.enqueue(operands, bench.gpu.stream())
        problem.check(result(bench, problem, operands))


def test_int8_sums_are_exact_at_extremes(bench: Workbench, blas: Blas) -> None:
    problem = Problem(make_gemm("int8", k=1024))
    problem.a[:], problem.b[:] = np.int8(-128), np.int8(-128)
    with closing(blas.prepare(problem.gemm, DEFAULT_SETTINGS)) as plan:
        problem.check(run(bench, plan, problem))
