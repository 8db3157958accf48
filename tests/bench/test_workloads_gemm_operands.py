from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import pairwise

import numpy as np
import pytest

from cudakit.arrays.compare import Compare
from cudakit.arrays.fill import Fill
from cudakit.bench.gemm_check import (
    OperandSets,
    Slab,
    fill_operands,
    make_operands,
    operand_bytes,
)
from cudakit.gpu.api import LEGACY
from cudakit.gpu.api.arrays import Floats
from cudakit.gpu.api.gemm import Gemm
from cudakit.gpu.sim import Sim

GEMM = Gemm(dtype="bf16", m=10, n=7, k=5, padding=1, batch=3, epilogue="bias")


@pytest.fixture
def gpu() -> Iterator[Sim]:
    with closing(Sim()) as sim:
        yield sim


def make_filled_operands(
    gpu: Sim, cleanup: ExitStack, kind: str = "uniform", number: int = 0
) -> OperandSets:
    sets = make_operands(gpu, GEMM, 4, cleanup)
    with closing(Fill(gpu)) as fill:
        fill_operands(fill, sets, kind, seed=1, set_index=number)
        gpu.sync()
    return sets


def values(gpu: Sim, slab: Slab | None) -> Floats:
    assert slab is not None
    with closing(Compare(gpu)) as compare:
        operand_sets = np.arange(slab.elements)
        return compare.sample(slab.ptr, slab.element, operand_sets, LEGACY)


def test_buffer_sets_are_aligned_disjoint_and_freed(gpu: Sim) -> None:
    free_bytes = gpu.memory_info().free_bytes
    with ExitStack() as cleanup:
        sets = make_operands(gpu, GEMM, 4, cleanup)
        operand_sets = [sets[number] for number in range(len(sets))]

        assert len(sets) == 4
        for name, size_bytes in (
            ("a", GEMM.a.size_bytes),
            ("b", GEMM.b.size_bytes),
            ("d", GEMM.d.size_bytes),
            ("bias", 2 * GEMM.m),
        ):
            addresses = [getattr(operand_set, name) for operand_set in operand_sets]
            assert all(begin % 512 == 0 for begin in addresses)
            assert all(high - low >= size_bytes for low, high in pairwise(addresses))
    assert gpu.memory_info().free_bytes == free_bytes


def test_operands_without_bias(gpu: Sim) -> None:
    plain = Gemm(dtype="bf16", m=10, n=7, k=5)
    with ExitStack() as cleanup:
        sets = make_operands(gpu, plain, 1, cleanup)

        assert sets.bias is None
        assert sets[0].bias == 0
    assert operand_bytes(plain) == 2 * (10 * 5 + 5 * 7 + 10 * 7)
    assert operand_bytes(GEMM) == 2 * (3 * (6 * 10 + 6 * 7 + 11 * 7) + 10)


def test_operands_and_buffer_sets_have_different_values(gpu: Sim) -> None:
    with ExitStack() as cleanup:
        first, second = (make_filled_operands(gpu, cleanup, number=number) for number in range(2))
        slabs = [slab for sets in (first, second) for slab in (sets.a, sets.b, sets.bias)]
        arrays = [values(gpu, slab) for slab in slabs]
        sets = arrays[0].reshape(4, -1)

    for index, operand_set in enumerate(arrays):
        assert not any(
            np.array_equal(operand_set[:50], later_array[:50])
            for later_array in arrays[index + 1 :]
        )
    assert not np.array_equal(sets[0], sets[1])


@pytest.mark.parametrize(
    ("kind", "low", "high", "has_many_values"),
    [
        ("uniform", -1, 1, True),
        ("normal", -6, 6, True),
        ("int", -4, 4, True),
        ("zeros", 0, 0, False),
        ("ones", 1, 1, False),
    ],
)
def test_operands_have_chosen_kind_of_data(
    gpu: Sim, kind: str, low: float, high: float, *, has_many_values: bool
) -> None:
    with ExitStack() as cleanup:
        data = values(gpu, make_filled_operands(gpu, cleanup, kind).a)

    assert low <= data.min() <= data.max() <= high
    assert (len(np.unique(data)) > 5) == has_many_values
    assert np.array_equal(data, np.rint(data)) == (kind in ("int", "zeros", "ones"))
