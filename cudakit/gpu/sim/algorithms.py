"""GEMM algorithms of the simulated library: workspace size and duration in virtual time.

A GEMM is divided into tiles, one per SM and wave; the last wave may leave SMs idle. Split-k creates more
tiles, whose partial sums are then reduced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from cudakit.gpu.api.elements import ELEMENTS
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings
from cudakit.gpu.sim.costs import Rates
from cudakit.units import format_bytes

# Values of cublasLtReductionScheme_t: partial sums are added to D in order of arrival, or in the workspace.
_REDUCTION_IN_PLACE, _REDUCTION_IN_WORKSPACE = 1, 2
_COUNTER_BYTES = 4
_REDUCTION_COST = 0.02  # estimated cost of a partial sum, relative to the GEMM
_MEMORY_OVERHEAD = 1 / 8  # overhead of a memory-bound GEMM, relative to a copy
_K_STEP = 32  # elements of k that an SM processes per step


class Tile(NamedTuple):
    """The part of D that an SM computes at a time; larger tiles reuse more of the loaded operands."""

    rows: int
    columns: int
    efficiency: float  # rate relative to the peak of the SM


# Tiles by their value of cublasLtMatmulTile_t.
TILES = {
    10: Tile(64, 8, 0.45),
    15: Tile(64, 64, 0.55),
    17: Tile(64, 128, 0.64),
    18: Tile(128, 64, 0.64),
    20: Tile(128, 128, 0.72),
    24: Tile(256, 128, 0.78),
}

_ALGORITHMS = (
    Algorithm(id=0, tile=10),
    Algorithm(id=1, tile=15),
    Algorithm(id=1, tile=17),
    Algorithm(id=1, tile=18),
    Algorithm(id=1, tile=20),
    Algorithm(id=2, tile=24, stages=4),
    Algorithm(id=3, tile=15, split_k=4, reduction=_REDUCTION_IN_WORKSPACE),
    Algorithm(id=3, tile=20, split_k=2, reduction=_REDUCTION_IN_WORKSPACE),
    Algorithm(id=3, tile=20, split_k=8, reduction=_REDUCTION_IN_WORKSPACE),
    Algorithm(id=4, tile=15, split_k=8, reduction=_REDUCTION_IN_PLACE),
    Algorithm(id=4, tile=24, split_k=2, reduction=_REDUCTION_IN_PLACE, stages=4),
)


def algorithms(gemm: Gemm) -> tuple[Algorithm, ...]:
    """Return the algorithms that can compute a GEMM, with their workspace sizes."""
    supported_algorithms = (
        algorithm
        for algorithm in _ALGORITHMS
        if algorithm.split_k == 1 or gemm.k >= algorithm.split_k * _K_STEP
    )
    return tuple(
        replace(algorithm, workspace_bytes=_workspace_bytes(gemm, algorithm))
        for algorithm in supported_algorithms
    )


def rejection_reason(algorithm: Algorithm, settings: GemmSettings) -> str:
    """Return the reason why settings exclude an algorithm, or ""."""
    if algorithm.workspace_bytes > settings.workspace_bytes:
        required_bytes, limit = algorithm.workspace_bytes, settings.workspace_bytes
        return (
            f"needs {format_bytes(required_bytes)} of workspace, {format_bytes(limit)} is allowed"
        )
    if settings.deterministic and algorithm.reduction == _REDUCTION_IN_PLACE:
        return "is not deterministic: the order of its additions varies"
    return ""


def sort_by_estimate(
    gemm: Gemm, candidates: Iterable[Algorithm], rates: Rates
) -> tuple[Algorithm, ...]:
    """Sort by estimated duration, which ignores idle SMs: the first algorithm may not be the fastest."""
    return tuple(sorted(candidates, key=lambda algorithm: _estimate(gemm, algorithm, rates)))


def count_blocks(gemm: Gemm, algorithm: Algorithm) -> int:
    """Return the number of thread blocks, one per tile."""
    tile = TILES[algorithm.tile]
    tile_count = ceil(gemm.m / tile.rows) * ceil(gemm.n / tile.columns)
    return tile_count * gemm.batch * algorithm.split_k


def excess_over_memory_ns(
    gemm: Gemm, algorithm: Algorithm, rates: Rates, memory_bytes_per_s: int
) -> int:
    """Return by how much a GEMM takes longer than its memory accesses, which overlap with arithmetic."""
    wave_count = ceil(count_blocks(gemm, algorithm) / rates.multiprocessors)
    arithmetic_s = wave_count * _tile_duration_s(gemm, algorithm, rates)
    memory_s = gemm.bytes_moved / memory_bytes_per_s
    return int(1e9 * max(arithmetic_s - memory_s, _MEMORY_OVERHEAD * memory_s))


def _estimate(gemm: Gemm, algorithm: Algorithm, rates: Rates) -> float:
    wave_count = max(count_blocks(gemm, algorithm) / rates.multiprocessors, 1.0)
    reduction_factor = 1 + _REDUCTION_COST * (algorithm.split_k - 1)
    return wave_count * reduction_factor * _tile_duration_s(gemm, algorithm, rates)


def _tile_duration_s(gemm: Gemm, algorithm: Algorithm, rates: Rates) -> float:
    tile = TILES[algorithm.tile]
    k_elements = ceil(gemm.k / algorithm.split_k / _K_STEP) * _K_STEP
    operations = 2 * tile.rows * tile.columns * k_elements
    return operations / (rates.operations_per_s * tile.efficiency)


def _workspace_bytes(gemm: Gemm, algorithm: Algorithm) -> int:
    if algorithm.reduction == _REDUCTION_IN_WORKSPACE:
        sum_count = gemm.m * gemm.n * gemm.batch * algorithm.split_k
        return sum_count * ELEMENTS[gemm.accumulate].size_bytes
    if algorithm.reduction == _REDUCTION_IN_PLACE:
        return count_blocks(gemm, algorithm) // algorithm.split_k * _COUNTER_BYTES
    return 0
