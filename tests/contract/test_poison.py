"""Tests the poison values of benchmarks, on every device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from contract.workbench import Workbench

from cudakit.arrays.poison import Poison, poison_byte
from cudakit.gpu.api import LEGACY, Gpu, Ptr
from cudakit.gpu.api.arrays import BF16, ELEMENTS, FP8_E5M2, FP64, INT32, Element, decode
from cudakit.gpu.api.gemm import Matrix

ROWS, COLUMNS, LEADING, BATCH, PITCH, COUNT = 5, 7, 8, 2, 128, 3


@pytest.fixture
def poison(gpu: Gpu) -> Iterator[Poison]:
    with closing(Poison(gpu)) as kernels:
        yield kernels


def matrix(element: Element) -> Matrix:
    return Matrix(element, ROWS, COLUMNS, LEADING, BATCH)


def poisoned(bench: Workbench, poison: Poison, element: Element) -> Ptr:
    device_memory = bench.gpu.malloc(PITCH * COUNT * element.size_bytes)
    poison.fill(device_memory, element, PITCH * COUNT, LEGACY)
    return device_memory


def write(bench: Workbench, device_memory: Ptr, element: Element, *indices: int) -> None:
    for index in indices:
        address = Ptr(device_memory + index * element.size_bytes)
        bench.gpu.fill(address, 0, element.size_bytes, LEGACY)


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_unwritten_elements_are_counted(bench: Workbench, poison: Poison, element: Element) -> None:
    device_memory = poisoned(bench, poison, element)
    values = ROWS * COLUMNS * BATCH * COUNT

    assert poison.count(device_memory, matrix(element), PITCH, COUNT, LEGACY) == (values, 0)
    write(bench, device_memory, element, 0, 1, PITCH + LEADING * COLUMNS)
    assert poison.count(device_memory, matrix(element), PITCH, COUNT, LEGACY) == (values - 3, 0)


@pytest.mark.parametrize(
    "element", [FP64, BF16, FP8_E5M2, INT32], ids=lambda element_type: element_type.name
)
def test_writes_between_columns_and_matrices_are_counted(
    bench: Workbench, poison: Poison, element: Element
) -> None:
    device_memory = poisoned(bench, poison, element)
    behind_a_column = (ROWS, PITCH + LEADING - 1)
    behind_a_matrix = (LEADING * COLUMNS * BATCH, PITCH * COUNT - 1)
    write(bench, device_memory, element, *behind_a_column, *behind_a_matrix)

    counts = poison.count(device_memory, matrix(element), PITCH, COUNT, LEGACY)

    assert counts == (ROWS * COLUMNS * BATCH * COUNT, 4)


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_poison_value_never_occurs_as_a_result(element: Element) -> None:
    bits = np.frombuffer(bytes([poison_byte(element)]) * element.size_bytes, element.storage_dtype)
    (value,) = decode(bits, element)

    assert np.isnan(value) or value <= -(2.0 ** (8 * element.size_bytes - 1)) * 0.99
