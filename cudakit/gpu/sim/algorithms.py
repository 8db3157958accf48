"""The algorithms of the simulated library: what each needs, and what it takes in virtual time.

A product is cut into tiles, and each SM computes one at a time: the last wave may leave SMs idle. Split-k
makes more tiles of the same product, whose parts of each sum are then added up.
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

# cublasLtReductionScheme_t: parts are added in D itself as they come, or all of them in the workspace.
_IN_PLACE, _IN_WORKSPACE = 1, 2
_COUNTER_BYTES = 4
_COST_OF_A_PART = 0.02  # what a heuristic takes adding it to be, of the whole
_SLOWER_THAN_A_COPY = 1 / 8
# What an SM takes of k at a time.
_STEP = 32


class Tile(NamedTuple):
    """What an SM computes at a time: larger ones get more out of what they load."""

    rows: int
    columns: int
    efficiency: float  # the part of the SM's rate that it reaches


# By cublasLtMatmulTile_t.
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
    Algorithm(id=3, tile=15, split_k=4, reduction=_IN_WORKSPACE),
    Algorithm(id=3, tile=20, split_k=2, reduction=_IN_WORKSPACE),
    Algorithm(id=3, tile=20, split_k=8, reduction=_IN_WORKSPACE),
    Algorithm(id=4, tile=15, split_k=8, reduction=_IN_PLACE),
    Algorithm(id=4, tile=24, split_k=2, reduction=_IN_PLACE, stages=4),
)


def algorithms(gemm: Gemm) -> tuple[Algorithm, ...]:
    """Return all that can compute a product, each with the workspace that it needs."""
    fitting = (each for each in _ALGORITHMS if each.split_k == 1 or gemm.k >= each.split_k * _STEP)
    return tuple(replace(each, workspace_bytes=_workspace_bytes(gemm, each)) for each in fitting)


def objection(algorithm: Algorithm, settings: GemmSettings) -> str:
    """Say why settings do not allow an algorithm; nothing where they do."""
    if algorithm.workspace_bytes > settings.workspace_bytes:
        needed, most = algorithm.workspace_bytes, settings.workspace_bytes
        return f"needs {format_bytes(needed)} of workspace, and {format_bytes(most)} are allowed"
    if settings.deterministic and algorithm.reduction == _IN_PLACE:
        return "adds in an order that varies, and is not deterministic"
    return ""


def recommended(gemm: Gemm, candidates: Iterable[Algorithm], rates: Rates) -> tuple[Algorithm, ...]:
    """Sort as a heuristic does that takes SMs to be never idle: good, and not always right."""
    return tuple(sorted(candidates, key=lambda each: _estimate(gemm, each, rates)))


def blocks(gemm: Gemm, algorithm: Algorithm) -> int:
    """Return how many tiles there are to compute."""
    tile = TILES[algorithm.tile]
    of_one = ceil(gemm.m / tile.rows) * ceil(gemm.n / tile.columns)
    return of_one * gemm.batch * algorithm.split_k


def busy_ns(gemm: Gemm, algorithm: Algorithm, rates: Rates, memory_bytes_per_s: int) -> int:
    """Say what a product takes beyond the time of its reads and writes, during which it computes.

    Where memory takes longer than arithmetic, it is still somewhat slower than a copy.
    """
    waves = ceil(blocks(gemm, algorithm) / rates.multiprocessors)
    arithmetic_s = waves * _tile_s(gemm, algorithm, rates)
    memory_s = gemm.bytes_moved / memory_bytes_per_s
    return int(1e9 * max(arithmetic_s - memory_s, _SLOWER_THAN_A_COPY * memory_s))


def _estimate(gemm: Gemm, algorithm: Algorithm, rates: Rates) -> float:
    waves = max(blocks(gemm, algorithm) / rates.multiprocessors, 1.0)
    additions = 1 + _COST_OF_A_PART * (algorithm.split_k - 1)
    return waves * additions * _tile_s(gemm, algorithm, rates)


def _tile_s(gemm: Gemm, algorithm: Algorithm, rates: Rates) -> float:
    tile = TILES[algorithm.tile]
    depth = ceil(gemm.k / algorithm.split_k / _STEP) * _STEP
    operations = 2 * tile.rows * tile.columns * depth
    return operations / (rates.operations_per_s * tile.efficiency)


def _workspace_bytes(gemm: Gemm, algorithm: Algorithm) -> int:
    if algorithm.reduction == _IN_WORKSPACE:
        sums = gemm.m * gemm.n * gemm.batch * algorithm.split_k
        return sums * ELEMENTS[gemm.accumulate].size_bytes
    if algorithm.reduction == _IN_PLACE:
        return blocks(gemm, algorithm) // algorithm.split_k * _COUNTER_BYTES
    return 0
