from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import product
from types import SimpleNamespace
from typing import Any

import contract.host_kernels  # noqa: F401 gives the simulated device its kernels
import pytest
from contract.kernels import SOURCE
from contract.products import Places, Problem, result, run, upload
from contract.workbench import Workbench, refused
from gpu.happens_before import races

from cudakit.errors import Unsupported
from cudakit.gpu.api import LEGACY, Ptr
from cudakit.gpu.api.gemm import (
    Algorithm,
    Gemm,
    GemmSettings,
    Library,
)
from cudakit.gpu.driver_errors import Status
from cudakit.gpu.sim import Sim
from cudakit.gpu.sim.algorithms import algorithms
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
