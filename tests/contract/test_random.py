"""Random numbers on every device: equal to numpy bit by bit, whatever the launch and the alignment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from arrays.test_philox import PUBLISHED
from arrays.test_random import START, drawn, every_draw
from contract.workbench import Workbench

from cudakit.arrays.random import Draw, RandomKernels, bits_draw, uniform_draw
from cudakit.arrays.random_values import Counter
from cudakit.gpu.api import LEGACY, Gpu, Ptr


@pytest.fixture
def kernels(gpu: Gpu) -> Iterator[RandomKernels]:
    with closing(RandomKernels(gpu)) as kernels:
        yield kernels


def filled(
    bench: Workbench, kernels: RandomKernels, draw: Draw, start: Counter, offset: int = 0
) -> npt.NDArray[Any]:
    """Run a draw ``offset`` elements after an aligned address; check that it writes only its range."""
    item_bytes = np.dtype(draw.storage).itemsize
    skipped_bytes, size_bytes = offset * item_bytes, (offset + draw.count) * item_bytes
    memory = bench.gpu.malloc(size_bytes + 16)
    bench.gpu.fill(memory, 0xEE, size_bytes + 16, LEGACY)
    kernels.fill(Ptr(memory + skipped_bytes), draw, start, LEGACY)
    content = bench.read_bytes(memory, size_bytes + 16)
    bench.gpu.free(memory)
    assert set(content[:skipped_bytes] + content[size_bytes:]) == {0xEE}
    return np.frombuffer(content[skipped_bytes:size_bytes], draw.storage)


@pytest.mark.parametrize("name", PUBLISHED)
def test_random_bits_match_published_vectors(
    bench: Workbench, kernels: RandomKernels, name: str
) -> None:
    position, sequence, seed, words = PUBLISHED[name]

    content = filled(bench, kernels, bits_draw(16), Counter(position, sequence, seed))

    assert content.view(np.uint32).tolist() == list(words)


@pytest.mark.parametrize(("count", "offset"), [(1, 0), (1000, 1), (70_001, 0), (4099, 3)])
def test_every_random_kernel_equals_numpy_bit_by_bit(
    bench: Workbench, kernels: RandomKernels, count: int, offset: int
) -> None:
    for draw in every_draw(count):
        assert np.array_equal(filled(bench, kernels, draw, START, offset), drawn(draw)), draw


def test_draw_of_no_elements_launches_nothing(bench: Workbench, kernels: RandomKernels) -> None:
    ptr = bench.ints(7)

    kernels.fill(ptr, uniform_draw(0, "float32", 0, 1), START, LEGACY)

    assert bench.read(ptr) == [7]
