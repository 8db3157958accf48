from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import pairwise

import numpy as np
import pytest

from cudakit.core.bench.workloads.gemm_operands import (
    OperandSets,
    Slab,
    fill_operands,
    make_operands,
    operand_bytes,
)
from cudakit.gpu.api import LEGACY
from cudakit.gpu.api.elements import Floats
from cudakit.gpu.api.gemm import Gemm
from cudakit.gpu.sim import Sim
from cudakit.kernels.compare import Compare
from cudakit.kernels.fill import Fill

GEMM = Gemm(dtype="bf16", m=10, n=7, k=5, padding=1, batch=3, epilogue="bias")


@pytest.fixture
def gpu() -> Iterator[Sim]:
    with closing(Sim()) as sim:
        yield sim


def made(gpu: Sim, cleanup: ExitStack, how: str = "uniform", number: int = 0) -> OperandSets:
    sets = make_operands(gpu, GEMM, 4, cleanup)
    with closing(Fill(gpu)) as fill:
        fill_operands(fill, sets, how, seed=1, number=number)
        gpu.sync()
    return sets


def values(gpu: Sim, slab: Slab | None) -> Floats:
    assert slab is not None
    with closing(Compare(gpu)) as compare:
        places = np.arange(slab.elements)
        return compare.sample(slab.ptr, slab.element, places, LEGACY)


def test_buffer_sets_lie_behind_one_another_aligned_and_all_is_given_back(gpu: Sim) -> None:
    free_bytes = gpu.memory_info().free_bytes
    with ExitStack() as cleanup:
        sets = make_operands(gpu, GEMM, 4, cleanup)
        places = [sets[number] for number in range(len(sets))]

        assert len(sets) == 4
        for name, size_bytes in (
            ("a", GEMM.a.size_bytes),
            ("b", GEMM.b.size_bytes),
            ("d", GEMM.d.size_bytes),
            ("bias", 2 * GEMM.m),
        ):
            begins = [getattr(one, name) for one in places]
            assert all(begin % 512 == 0 for begin in begins)
            assert all(high - low >= size_bytes for low, high in pairwise(begins))
    assert gpu.memory_info().free_bytes == free_bytes


def test_operands_without_bias(gpu: Sim) -> None:
    plain = Gemm(dtype="bf16", m=10, n=7, k=5)
    with ExitStack() as cleanup:
        sets = make_operands(gpu, plain, 1, cleanup)

        assert sets.bias is None
        assert sets[0].bias == 0
    assert operand_bytes(plain) == 2 * (10 * 5 + 5 * 7 + 10 * 7)
    assert operand_bytes(GEMM) == 2 * (3 * (6 * 10 + 6 * 7 + 11 * 7) + 10)


def test_no_two_operands_or_buffer_sets_have_the_same_values(gpu: Sim) -> None:
    with ExitStack() as cleanup:
        first, second = (made(gpu, cleanup, number=number) for number in range(2))
        slabs = [slab for sets in (first, second) for slab in (sets.a, sets.b, sets.bias)]
        seen = [values(gpu, slab) for slab in slabs]
        sets = seen[0].reshape(4, -1)

    for at, one in enumerate(seen):
        assert not any(np.array_equal(one[:50], other[:50]) for other in seen[at + 1 :])
    assert not np.array_equal(sets[0], sets[1])


@pytest.mark.parametrize(
    ("how", "least", "most", "several"),
    [
        ("uniform", -1, 1, True),
        ("normal", -6, 6, True),
        ("int", -4, 4, True),
        ("zeros", 0, 0, False),
        ("ones", 1, 1, False),
    ],
)
def test_fill_writes_the_chosen_data(
    gpu: Sim, how: str, least: float, most: float, *, several: bool
) -> None:
    with ExitStack() as cleanup:
        found = values(gpu, made(gpu, cleanup, how).a)

    assert least <= found.min() <= found.max() <= most
    assert (len(np.unique(found)) > 5) == several
    assert np.array_equal(found, np.rint(found)) == (how in ("int", "zeros", "ones"))
