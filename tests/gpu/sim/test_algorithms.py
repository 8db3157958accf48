from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import product
from typing import Any

import pytest
from contract.products import Places

from cudakit.bench.roofline import Limit, Work, limit, matrix_kind
from cudakit.errors import Unsupported
from cudakit.gpu.api import LEGACY, Ptr
from cudakit.gpu.api.gemm import DATA_TYPES, Algorithm, Gemm, GemmSettings
from cudakit.gpu.sim import Sim
from cudakit.gpu.sim.algorithms import (
    algorithms,
    excess_over_memory_ns,
    rejection_reason,
    sort_by_estimate,
)
from cudakit.gpu.sim.costs import rates_of
from cudakit.units import Unavailable

DEFAULT_SETTINGS = GemmSettings()
SIZES = (64, 512, 1000, 2048, 4096, 8192)
LARGE = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 16, 16384), (2048, 8192, 1024))


def make_gemm(dtype: str = "fp32", **options: Any) -> Gemm:
    return Gemm(dtype=dtype, **{"m": 48, "n": 32, "k": 64, **options})


@pytest.fixture
def sim() -> Iterator[Sim]:
    with closing(Sim()) as sim:
        yield sim


def seconds(sim: Sim, gemm: Gemm, algorithm: Algorithm) -> float:
    """Return the duration of a GEMM on an idle device, in seconds."""
    busy = excess_over_memory_ns(
        gemm, algorithm, rates_of(sim.facts(), gemm.dtype), sim.costs.memory_bytes_per_s
    )
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
        first = sort_by_estimate(gemm, allowed, rates_of(sim.facts(), "bf16"))[0]
        best_s = min(seconds(sim, gemm, algorithm) for algorithm in allowed)
        slower.append(seconds(sim, gemm, first) > 1.01 * best_s)

    assert 0.1 < sum(slower) / len(slower) < 0.5


def test_no_algorithm_is_fastest_for_every_shape(sim: Sim) -> None:
    best = set()
    for m, n, k in product(SIZES, SIZES, SIZES):
        gemm = make_gemm("bf16", m=m, n=n, k=k)
        best.add(min(algorithms(gemm), key=lambda algorithm: seconds(sim, gemm, algorithm)).tile)

    assert len(best) >= 3


@pytest.mark.parametrize("model", ["h200", "wsl"])
@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_large_gemm_approaches_peak_from_below(model: str, dtype: str) -> None:
    with closing(Sim(model)) as sim:
        for m, n, k in LARGE:
            gemm = Gemm(dtype=dtype, m=m, n=n, k=k)
            # Simulated libraries refuse GEMMs of this size, whose values a CPU would compute for minutes.
            fastest = min(seconds(sim, gemm, algorithm) for algorithm in algorithms(gemm))
            ratio = limit_of(sim, gemm).seconds / fastest
            assert 0.3 < ratio < 0.95, gemm


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
