""""""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import product
from types import SimpleNamespace
from typing import Any

import contract.host_kernels  # noqa: F401 gives the simulated device its kernels
import numpy as np
import pytest
from contract.kernels import SOURCE
from contract.products import Places, Problem, result, run, upload
from contract.workbench import Workbench, refused
from gpu.happens_before import races
from hypothesis import given, settings
from hypothesis import strategies as st

from cudakit.bench.roofline import Limit, Work, limit, matrix_kind
from cudakit.errors import Unsupported
from cudakit.gpu.api import LEGACY, Ptr
from cudakit.gpu.api.arrays import (
    BF16,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    INT32,
    Element,
    decode,
    encode,
)
from cudakit.gpu.api.gemm import (
    DATA_TYPES,
    EPILOGUES,
    LAYOUTS,
    Algorithm,
    Gemm,
    GemmSettings,
    Library,
)
from cudakit.gpu.driver_errors import Status
from cudakit.gpu.sim import Sim
from cudakit.gpu.sim.blas import (
    ResultCache,
    algorithms,
    excess_over_memory_ns,
    multiply,
    rejection_reason,
    round_to,
    sort_by_estimate,
)
from cudakit.trace.events import Access, Alloc, Event, Free, GraphNode, Launch
from cudakit.trace.kinds import AccessMode
from cudakit.units import Unavailable

DEFAULT_SETTINGS = GemmSettings()


def make_gemm(dtype: str = "fp32", **options: Any) -> Gemm:
    return Gemm(dtype=dtype, **{"m": 48, "n": 32, "k": 64, **options})


def make_bench(**options: Any) -> Workbench:
    sim = Sim(**options)
    return Workbench(sim, sim.compile(SOURCE))


@pytest.fixture
def bench() -> Iterator[Workbench]:
    bench = make_bench()
    with closing(bench.gpu):
        yield bench


@pytest.fixture
def sim() -> Iterator[Sim]:
    with closing(Sim()) as sim:
        yield sim


# --- the trace


def test_gemm_is_traced_as_launch_with_accesses() -> None:
    trace: list[Event] = []
    bench = make_bench(sink=trace.append)
    gemm = make_gemm("bf16", padding=8, batch=2, epilogue="bias")
    operands = upload(bench, Problem(gemm))
    algorithm = Algorithm(id=1, tile=15)
    plan = bench.gpu.blas().prepare(gemm, DEFAULT_SETTINGS, algorithm)
    begin = len(trace)
    plan.enqueue(operands, LEGACY)
    bench.gpu.close()

    bodies = [event.body for event in trace[begin:]]
    assert bodies == [
        Launch(LEGACY, "sim_gemm_bf16_tn", (2, 1, 1), (256, 1, 1)),
        Access(operands.bias, operands.bias + 96, AccessMode.READ),
        _columns(operands.a, 64, 2 * 48, AccessMode.READ),
        _columns(operands.b, 64, 2 * 32, AccessMode.READ),
        _columns(operands.d, 48, 2 * 32, AccessMode.WRITE),
    ]


def _columns(ptr: Ptr, rows: int, count: int, mode: AccessMode) -> Access:
    step = 2 * (rows + 8)
    end = ptr + step * (count - 1) + 2 * rows
    return Access(ptr, end, mode, stride_bytes=step, count=count)


def test_captured_gemm_is_named_node() -> None:
    trace: list[Event] = []
    bench = make_bench(sink=trace.append)
    gemm, stream = make_gemm(), bench.gpu.stream()
    operands = upload(bench, Problem(gemm))
    plan = bench.gpu.blas().prepare(gemm, DEFAULT_SETTINGS)
    bench.gpu.capture_begin(stream)
    plan.enqueue(operands, stream)
    bench.gpu.capture_end(stream)
    bench.gpu.close()

    nodes = [event.body for event in trace if isinstance(event.body, GraphNode)]
    assert [node.name for node in nodes] == ["sim_gemm_fp32_tn"]


def split(gemm: Gemm) -> Algorithm:
    """Return an algorithm that needs a workspace."""
    return next(algorithm for algorithm in algorithms(gemm) if algorithm.workspace_bytes)


def test_workspace_is_device_memory() -> None:
    trace: list[Event] = []
    sim = Sim(sink=trace.append)
    gemm = make_gemm(k=4096)
    sim.blas().prepare(gemm, DEFAULT_SETTINGS, split(gemm)).close()
    sim.close()

    bodies = [event.body for event in trace if isinstance(event.body, Alloc | Free)]
    assert [type(body) for body in bodies] == [Alloc, Free]
    assert {body.size_bytes for body in bodies} == {split(gemm).workspace_bytes}


@pytest.mark.parametrize(("streams", "expected"), [(1, 0), (2, 1)])
def test_shared_workspace_on_two_streams_races(streams: int, expected: int) -> None:
    trace: list[Event] = []
    bench = make_bench(sink=trace.append)
    gemm = make_gemm(k=4096)
    uploads = [upload(bench, Problem(gemm)) for _ in range(2)]
    plan = bench.gpu.blas().prepare(gemm, DEFAULT_SETTINGS, split(gemm))
    streams_used = [bench.gpu.stream(blocking=False) for _ in range(streams)]
    for index, operands in enumerate(uploads):
        plan.enqueue(operands, streams_used[index % streams])
    bench.gpu.close()

    assert len(races(trace)) == expected


# --- failures


@pytest.mark.parametrize("operand", ["a", "b", "d", "bias"])
def test_gemm_on_unallocated_memory_fails_as_launch(operand: str) -> None:
    bench = make_bench()
    problem = Problem(make_gemm(epilogue="bias"))
    operands = upload(bench, problem)
    bench.gpu.free(getattr(operands, operand))
    bench.gpu.blas().prepare(problem.gemm, DEFAULT_SETTINGS).enqueue(operands, LEGACY)

    with refused(Status.ILLEGAL_ADDRESS) as caught:
        bench.gpu.sync()
    assert "sim_gemm_fp32_tn" in caught.value.message


def test_gemm_with_too_small_operand_fails() -> None:
    bench = make_bench()
    gemm = make_gemm("fp64")
    operands = upload(bench, Problem(make_gemm("fp64", n=8)))
    bench.gpu.blas().prepare(gemm, DEFAULT_SETTINGS).enqueue(operands, LEGACY)

    with refused(Status.ILLEGAL_ADDRESS):
        bench.gpu.sync()


def test_gemm_in_unknown_stream_is_refused(bench: Workbench) -> None:
    problem, stream = Problem(make_gemm()), bench.gpu.stream()
    bench.gpu.destroy_stream(stream)
    plan = bench.gpu.blas().prepare(problem.gemm, DEFAULT_SETTINGS)

    with refused(Status.INVALID_HANDLE):
        plan.enqueue(upload(bench, problem), stream)


def test_workspace_out_of_memory_is_reported() -> None:
    gemm = make_gemm(k=4096)
    with closing(Sim(capacity_bytes=1024)) as sim, refused(Status.OUT_OF_MEMORY):
        sim.blas().prepare(gemm, DEFAULT_SETTINGS, split(gemm))


NULL_OPERANDS = Places(Ptr(0), Ptr(0), Ptr(0), Ptr(0))


def test_closed_blas_and_gemm_are_refused(sim: Sim) -> None:
    blas, gemm = sim.blas(), make_gemm()
    plan = blas.prepare(gemm, DEFAULT_SETTINGS)
    plan.close()
    blas.close()

    with refused(Status.INVALID_HANDLE):
        plan.enqueue(NULL_OPERANDS, LEGACY)
    for call in (
        blas.prepare,
        blas.algorithms,
        lambda *_: blas.heuristics(gemm, DEFAULT_SETTINGS, 1),
    ):
        with refused(Status.INVALID_HANDLE):
            call(gemm, DEFAULT_SETTINGS)


def test_closed_device_rejects_blas_calls() -> None:
    sim, gemm = Sim(), make_gemm(k=4096)
    blas = sim.blas()
    plan = blas.prepare(gemm, DEFAULT_SETTINGS, split(gemm))
    sim.close()

    with refused(Status.CONTEXT_IS_DESTROYED):
        plan.enqueue(NULL_OPERANDS, LEGACY)
    with refused(Status.CONTEXT_IS_DESTROYED):
        blas.prepare(gemm, DEFAULT_SETTINGS)
    with refused(Status.CONTEXT_IS_DESTROYED):
        sim.blas()
    plan.close()
    blas.close()


# --- supported GEMMs


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_torch_and_cupy_need_real_gpu(sim: Sim, library: Library) -> None:
    with pytest.raises(Unsupported) as caught:
        sim.blas(library)
    assert f"{library} needs a real GPU" in caught.value.message
    assert "--vs cublas" in caught.value.hint


def test_old_device_error_lists_supported_types() -> None:
    with closing(Sim("a100-mig")) as sim:
        blas = sim.blas()
        blas.prepare(make_gemm("bf16"), DEFAULT_SETTINGS)
        with pytest.raises(Unsupported) as caught:
            blas.prepare(make_gemm("fp8_e4m3"), DEFAULT_SETTINGS)
    assert caught.value.message == (
        "fp8_e4m3 needs compute capability 8.9 or newer; NVIDIA A100-SXM4-80GB MIG 3g.40gb has 8.0"
    )
    assert caught.value.hint == "supported here: fp64, fp32, tf32, fp16, bf16, int8"


@pytest.mark.parametrize(
    ("gemm", "reason"),
    [
        (
            make_gemm("fp8_e4m3", layout="nn"),
            "only layout tn on compute capability 9.0, but nn was requested",
        ),
        (make_gemm("fp8_e5m2", m=44), "multiple of 16 B; the column size of D is "),
        (make_gemm("fp8_e5m2", padding=8), "the leading dimension of A is 72 B"),
        (make_gemm(m=2048, n=2048, k=2049), "may have at most 12.6 million elements together"),
        (make_gemm(n=4096, k=64, batch=64), "may have at most 12.6 million elements together"),
        (make_gemm("int8", k=66), "multiple of 4 B; the column size of A is 66 B"),
        (make_gemm("int8", epilogue="relu"), "only epilogue none, but relu was requested"),
        (make_gemm("fp16", accumulate="fp16", output="fp32"), "needs output fp16, but fp32 was"),
    ],
)
def test_unsupported_error_has_request(sim: Sim, gemm: Gemm, reason: str) -> None:
    blas = sim.blas()
    for method in (blas.prepare, blas.algorithms):
        with pytest.raises(Unsupported) as caught:
            method(gemm, DEFAULT_SETTINGS)
        assert reason in caught.value.message
        assert "\n" not in caught.value.message + caught.value.hint


def test_cublas_refuses_algorithms(sim: Sim) -> None:
    blas, gemm = sim.blas("cublas"), make_gemm()
    with closing(blas.prepare(gemm, DEFAULT_SETTINGS)) as plan:
        assert isinstance(plan.algorithm, Unavailable)
    calls = (
        lambda: blas.algorithms(gemm, DEFAULT_SETTINGS),
        lambda: blas.heuristics(gemm, DEFAULT_SETTINGS, 1),
        lambda: blas.prepare(gemm, DEFAULT_SETTINGS, algorithms(gemm)[0]),
    )
    for method in calls:
        with pytest.raises(Unsupported, match="chooses its algorithm internally"):
            method()


# --- bits


def test_every_model_computes_same_bits() -> None:
    problem = Problem(make_gemm("bf16", k=4096))
    contents = set()
    for model, seed in product(("h200", "a100-mig"), (None, 1, 2)):
        bench = make_bench(model=model, seed=seed)
        with closing(bench.gpu):
            blas = bench.gpu.blas()
            for algorithm in blas.heuristics(problem.gemm, DEFAULT_SETTINGS, 99):
                plan = blas.prepare(problem.gemm, DEFAULT_SETTINGS, algorithm)
                contents.add(run(bench, plan, problem))

    assert len(contents) == 1


def test_changed_operands_are_computed_again(bench: Workbench) -> None:
    gemm = make_gemm("fp16", epilogue="bias")
    problems = [Problem(gemm, seed) for seed in range(3)]
    operands = upload(bench, problems[0])
    plan = bench.gpu.blas().prepare(gemm, DEFAULT_SETTINGS)
    other_bias = Problem(gemm, 0)
    other_bias.bias = problems[1].bias
    for problem in [*problems, *problems, other_bias]:
        for ptr, bits in (
            (operands.a, problem.a),
            (operands.b, problem.b),
            (operands.bias, problem.bias),
        ):
            bench.write(ptr, bits)
        plan.enqueue(operands, LEGACY)
        problem.check(result(bench, problem, operands))


def test_gemm_of_matrix_with_itself_needs_no_copy(bench: Workbench) -> None:
    problem = Problem(make_gemm("fp32", m=32, n=32, k=32))
    problem.b = problem.a
    operands = upload(bench, problem)
    alias = SimpleNamespace(a=operands.a, b=operands.a, d=operands.d, bias=operands.bias)
    bench.gpu.blas().prepare(problem.gemm, DEFAULT_SETTINGS).enqueue(alias, LEGACY)
    problem.check(result(bench, problem, operands))


SIZES = (64, 512, 1000, 2048, 4096, 8192)


def seconds(sim: Sim, gemm: Gemm, algorithm: Algorithm) -> float:
    """Return the duration of a GEMM on an idle device, in seconds."""
    busy = excess_over_memory_ns(gemm, algorithm, sim.facts(), sim.costs.memory_bytes_per_s)
    bytes_moved = gemm.bytes_moved + algorithm.workspace_bytes
    return (busy + sim.costs.device_memory_ns(bytes_moved)) * 1e-9


def limit_of(sim: Sim, gemm: Gemm) -> Limit:
    fields = sim.facts().fields
    work = Work(gemm.operations, matrix_kind(gemm.dtype, fields), gemm.bytes_moved)
    value = limit(work, fields, Unavailable("not measured"))
    assert isinstance(value, Limit)
    return value


def test_settings_exclude_algorithms(sim: Sim) -> None:
    blas, gemm = sim.blas(), make_gemm(m=1024, n=1024, k=4096)
    every_algorithm = list(blas.algorithms(gemm, DEFAULT_SETTINGS))
    small_workspace_algorithms = list(blas.algorithms(gemm, GemmSettings(workspace_bytes=1 << 20)))
    deterministic_algorithms = list(blas.algorithms(gemm, GemmSettings(deterministic=True)))

    assert 6 <= len(every_algorithm) <= 12
    assert small_workspace_algorithms == [
        algorithm for algorithm in every_algorithm if algorithm.workspace_bytes <= 1 << 20
    ]
    assert deterministic_algorithms == [
        algorithm for algorithm in every_algorithm if algorithm.reduction != 1
    ]
    assert len(every_algorithm) > max(
        len(small_workspace_algorithms), len(deterministic_algorithms)
    )
    assert sorted(map(repr, blas.heuristics(gemm, DEFAULT_SETTINGS, 99))) == sorted(
        map(repr, every_algorithm)
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (GemmSettings(workspace_bytes=0), "of workspace, 0 B is allowed"),
        (GemmSettings(deterministic=True), "is not deterministic"),
    ],
)
def test_excluded_algorithm_is_refused(sim: Sim, settings: GemmSettings, reason: str) -> None:
    gemm = make_gemm(k=4096)
    excluded_algorithm = next(
        algorithm
        for algorithm in algorithms(gemm)
        if reason in rejection_reason(algorithm, settings)
    )

    with pytest.raises(Unsupported) as caught:
        sim.blas().prepare(gemm, settings, excluded_algorithm)
    assert reason in caught.value.message
    assert caught.value.hint


def test_unknown_algorithm_is_refused(sim: Sim) -> None:
    with pytest.raises(Unsupported, match="no such algorithm for this GEMM") as caught:
        sim.blas().prepare(make_gemm(), DEFAULT_SETTINGS, Algorithm(id=99))
    assert caught.value.hint


def test_first_heuristic_is_usually_fastest(sim: Sim) -> None:
    slower = []
    for m, n, k in product(SIZES, SIZES, SIZES):
        gemm = make_gemm("bf16", m=m, n=n, k=k)
        allowed = [
            algorithm
            for algorithm in algorithms(gemm)
            if not rejection_reason(algorithm, DEFAULT_SETTINGS)
        ]
        first = sort_by_estimate(gemm, allowed, sim.facts())[0]
        best_s = min(seconds(sim, gemm, algorithm) for algorithm in allowed)
        slower.append(seconds(sim, gemm, first) > 1.01 * best_s)

    assert 0.1 < sum(slower) / len(slower) < 0.5


def test_no_algorithm_is_fastest_for_every_shape(sim: Sim) -> None:
    best = set()
    for m, n, k in product(SIZES, SIZES, SIZES):
        gemm = make_gemm("bf16", m=m, n=n, k=k)
        best.add(min(algorithms(gemm), key=lambda algorithm: seconds(sim, gemm, algorithm)).tile)

    assert len(best) >= 3


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_no_algorithm_exceeds_peak(sim: Sim, dtype: str) -> None:
    for m, n, k in product((16, 1024, 8192), repeat=3):
        gemm = Gemm(dtype=dtype, m=m, n=n, k=k)
        for algorithm in algorithms(gemm):
            assert seconds(sim, gemm, algorithm) > limit_of(sim, gemm).seconds / 0.95


def test_events_measure_gemm_duration(sim: Sim) -> None:
    gemm = make_gemm("bf16", m=512, n=512, k=512)
    blas, operands = sim.blas(), Places(*(Ptr(sim.malloc(1 << 20)) for _ in range(4)))
    for algorithm in blas.heuristics(gemm, DEFAULT_SETTINGS, 3):
        plan = blas.prepare(gemm, DEFAULT_SETTINGS, algorithm)
        for _ in range(8):  # keeps the device busy until all work is enqueued
            plan.enqueue(operands, LEGACY)
        begin, end = sim.event(), sim.event()
        sim.record(begin, LEGACY)
        plan.enqueue(operands, LEGACY)
        sim.record(end, LEGACY)
        sim.sync()
        expected_s = seconds(sim, gemm, algorithm)
        assert sim.elapsed(begin, end) == pytest.approx(expected_s, abs=2e-8)


INF, NAN = float("inf"), float("nan")


@st.composite
def gemms(draw: st.DrawFn) -> Gemm:
    """Draw a small GEMM that the simulated library supports."""
    dtype = draw(st.sampled_from([*DATA_TYPES]))
    kind, fp8 = DATA_TYPES[dtype], dtype.startswith("fp8")
    multiple = 16 if fp8 else 4 if dtype == "int8" else 1
    accumulate = draw(st.sampled_from(kind.accumulators))
    outputs = [element.name for element in kind.outputs]
    return Gemm(
        dtype=dtype,
        m=multiple * draw(st.integers(1, 40 // multiple)),
        n=draw(st.integers(1, 20)) * (multiple if dtype == "int8" else 1),
        k=multiple * draw(st.integers(1, 40 // multiple)),
        layout="tn" if fp8 else draw(st.sampled_from(LAYOUTS)),
        batch=draw(st.integers(1, 3)),
        padding=multiple * draw(st.integers(0, 3)),
        epilogue="none" if dtype == "int8" else draw(st.sampled_from(EPILOGUES)),
        output="fp16" if accumulate == "fp16" else draw(st.sampled_from(outputs)),
        accumulate=accumulate,
    )


@settings(max_examples=100, deadline=None)
@given(gemms(), st.integers(0, 99))
def test_gemm_matches_definition(gemm: Gemm, seed: int) -> None:
    problem = Problem(gemm, seed)
    with closing(Sim()) as sim:
        bench = Workbench(sim, sim.compile(SOURCE))
        plan = sim.blas().prepare(gemm, GemmSettings())
        problem.check(run(bench, plan, problem))


def dot(
    dtype: str, a: list[float], b: list[float], bias: float | None = None, **options: Any
) -> float:
    """Multiply a row by a column."""
    gemm = Gemm(dtype=dtype, m=1, n=1, k=len(a), layout="tn", **options)
    row, column = encode([a], gemm.a.element), encode([b], gemm.b.element)
    added = None if bias is None else encode([bias], gemm.bias)
    return float(decode(multiply(gemm, row, column, added), gemm.d.element)[0, 0])


def test_sum_is_rounded_once() -> None:
    tiny = 2.0**-25

    assert dot("fp32", [1.0, tiny, tiny, tiny, tiny], [1.0] * 5) == 1 + 2**-23
    assert dot("fp16", [1.0, 2.0**-12, 2.0**-12], [1.0] * 3, output="fp32") == 1 + 2**-11


def test_sum_is_rounded_to_accumulator_first() -> None:
    row, column = [2048.0, 1.0], [1.0, 1.0]

    assert dot("fp16", row, column, bias=1.0, epilogue="bias") == 2050
    assert dot("fp16", row, column, bias=1.0, epilogue="bias", accumulate="fp16") == 2048


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1 + 2**-11, 1.0),  # a tie is rounded to even
        (1 + 3 * 2**-11, 1 + 2**-9),
        (1 + 2**-11 + 2**-20, 1 + 2**-10),
        (-(1 + 2**-11 + 2**-20), -(1 + 2**-10)),
        (3.0, 3.0),
    ],
)
def test_tf32_factors_have_10_bits(value: float, rounded: float) -> None:
    assert dot("tf32", [value], [1.0]) == dot("tf32", [1.0], [value]) == rounded
    assert dot("fp32", [value], [1.0]) == value


def test_int8_sums_are_exact_and_wrap_around() -> None:
    assert dot("int8", [-128.0] * 131_071, [-128.0] * 131_071) == 131_071 * 2**14
    assert dot("int8", [-128.0] * 131_072, [-128.0] * 131_072) == -(2.0**31)


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_nan_is_preserved(dtype: str) -> None:
    element = DATA_TYPES[dtype].a
    gemm = Gemm(dtype=dtype, m=1, n=1, k=1)
    for output in (gemm.output, DATA_TYPES[dtype].outputs[-1].name):
        gemm = Gemm(dtype=dtype, m=1, n=1, k=1, output=output)
        row = (
            np.full((1, 1), 0xFF, np.uint8)
            .repeat(element.size_bytes, 1)
            .view(element.storage_dtype)
        )
        column = encode([[1.0]], gemm.b.element)
        assert np.isnan(decode(multiply(gemm, row, column), gemm.d.element)[0, 0])


@pytest.mark.parametrize(
    ("element", "value", "rounded"),
    [
        (FP16, 65519.0, 65504.0),
        (FP16, -65520.0, -INF),
        (BF16, 3.4e38, INF),
        (FP32, 1e39, INF),
        (FP8_E4M3, 1e6, 448.0),
        (FP8_E4M3, -INF, -448.0),
        (FP8_E5M2, INF, 57344.0),
        (BF16, 1 + 2**-8, 1.0),
        (BF16, 1 + 3 * 2**-8, 1 + 2**-6),
        (INT32, 2.0**31, -(2.0**31)),
    ],
)
def test_overflow_gives_infinity_or_largest_value(
    element: Element, value: float, rounded: float
) -> None:
    with np.errstate(over="ignore"):
        assert decode(round_to(np.array([value]), element), element)[0] == rounded


@given(st.lists(st.floats(-4e4, 4e4, width=32), min_size=1), st.sampled_from([BF16, FP16, FP32]))
def test_rounding_matches_kernels(values: list[float], element: Element) -> None:
    exact = np.array(values)

    assert round_to(exact, element).tolist() == encode(exact, element).tolist()


def test_gelu_is_tanh_form() -> None:
    values = {-3.0: -0.00363739, -1.0: -0.15880801, 0.0: 0.0, 0.5: 0.34571401, 2.0: 1.95459769}
    for value, expected in values.items():
        assert dot("fp64", [value], [1.0], epilogue="gelu") == pytest.approx(expected, abs=1e-8)


def test_gemm_results_are_cached_within_size_limit() -> None:
    gemm = Gemm(dtype="fp32", m=4, n=4, k=4)
    first, second = (np.full((4, 4), value, np.float32) for value in (1, 2))
    large_cache, small_cache = ResultCache(1 << 10), ResultCache(gemm.d.size_bytes)
    for products in (large_cache, small_cache):
        product = products.multiply(gemm, first, first)
        assert products.multiply(gemm, first.copy(), first.copy()) is product
        assert products.multiply(gemm, first, second).tolist() == [[8.0] * 4] * 4
        assert (products.multiply(gemm, first, first) is product) == (products is large_cache)


def test_cached_gemm_result_depends_on_gemm() -> None:
    products, bits = ResultCache(), np.arange(16, dtype=np.float32).reshape(4, 4)
    layout_nn = products.multiply(Gemm(dtype="fp32", m=4, n=4, k=4, layout="nn"), bits, bits)
    transposed = products.multiply(Gemm(dtype="fp32", m=4, n=4, k=4, layout="tn"), bits, bits)

    assert layout_nn.tolist() == (bits @ bits).tolist()
    assert transposed.tolist() == (bits @ bits.T).tolist()
