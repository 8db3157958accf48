from __future__ import annotations

import numpy as np
from contract.workbench import Workbench, refused

from cudakit.gpu.api import LEGACY, Backing, Gpu, Ptr
from cudakit.gpu.driver_errors import Status
from cudakit.units import format_bytes


def mapped(gpu: Gpu, pages: int = 1) -> tuple[Ptr, Backing]:
    size = pages * gpu.granularity()
    ptr, backing = gpu.reserve(size), gpu.create(size)
    gpu.map(ptr, backing, size)
    return ptr, backing


def test_mapped_memory_is_readable_and_writable(bench: Workbench) -> None:
    ptr, _ = mapped(bench.gpu)
    bench.write(ptr, np.array([1, 2], np.int32))
    bench.add(ptr, 2, 10)

    assert bench.read(ptr, 2) == [11, 12]


def test_adjacent_mappings_form_one_range(bench: Workbench) -> None:
    gpu, page_bytes = bench.gpu, bench.gpu.granularity()
    ptr = gpu.reserve(2 * page_bytes)
    gpu.map(ptr, gpu.create(page_bytes), page_bytes)
    gpu.map(Ptr(ptr + page_bytes), gpu.create(page_bytes), page_bytes)

    gpu.fill(ptr, 7, 2 * page_bytes, LEGACY)

    assert bench.read_bytes(Ptr(ptr + page_bytes - 2), 4) == b"\7" * 4


def test_remapped_memory_keeps_content(bench: Workbench) -> None:
    gpu, page_bytes = bench.gpu, bench.gpu.granularity()
    first, backing = mapped(gpu)
    bench.write(first, np.array([42], np.int32))
    gpu.unmap(first, page_bytes)
    second = gpu.reserve(page_bytes)
    gpu.map(second, backing, page_bytes)

    assert bench.read(second) == [42]


def test_two_mappings_share_memory(bench: Workbench) -> None:
    gpu, page_bytes = bench.gpu, bench.gpu.granularity()
    first, backing = mapped(gpu)
    second = gpu.reserve(page_bytes)
    gpu.map(second, backing, page_bytes)
    bench.write(first, np.array([9], np.int32))

    assert bench.read(second) == [9]


def test_released_backing_lives_until_unmapped(bench: Workbench) -> None:
    gpu, page_bytes = bench.gpu, bench.gpu.granularity()
    free_bytes_before = gpu.memory_info().free_bytes
    ptr, backing = mapped(gpu, pages=8)
    gpu.release(backing)
    bench.write(ptr, np.array([3], np.int32))

    assert bench.read(ptr) == [3]
    assert gpu.memory_info().free_bytes <= free_bytes_before - 8 * page_bytes
    gpu.unmap(ptr, 8 * page_bytes)
    assert gpu.memory_info().free_bytes == free_bytes_before


def test_reserved_addresses_take_no_memory(gpu: Gpu) -> None:
    memory_before = gpu.memory_info()
    size = 4 * memory_before.total_bytes // gpu.granularity() * gpu.granularity()
    ptr = gpu.reserve(size)

    assert gpu.memory_info().free_bytes == memory_before.free_bytes
    gpu.unreserve(ptr, size)


def test_create_out_of_memory_reports_sizes(gpu: Gpu) -> None:
    page_bytes = gpu.granularity()
    requested = 2 * gpu.memory_info().total_bytes // page_bytes * page_bytes

    with refused(Status.OUT_OF_MEMORY) as caught:
        gpu.create(requested)
    assert f"{format_bytes(requested)} requested" in caught.value.message


def test_size_must_be_multiple_of_granularity(gpu: Gpu) -> None:
    page_bytes = gpu.granularity()

    with refused(Status.INVALID_VALUE) as caught:
        gpu.create(page_bytes + 1)
    assert str(page_bytes) in caught.value.message


def test_sizes_of_zero_are_refused(gpu: Gpu) -> None:
    with refused(Status.INVALID_VALUE):
        gpu.reserve(0)
    with refused(Status.INVALID_VALUE):
        gpu.create(0)


def test_mapped_range_cannot_be_mapped_again(gpu: Gpu) -> None:
    page_bytes = gpu.granularity()
    ptr, _ = mapped(gpu)

    with refused(Status.INVALID_VALUE):
        gpu.map(ptr, gpu.create(page_bytes), page_bytes)


def test_unmapped_range_cannot_be_unmapped(gpu: Gpu) -> None:
    page_bytes = gpu.granularity()
    ptr, _ = mapped(gpu)
    gpu.unmap(ptr, page_bytes)

    with refused(Status.INVALID_VALUE):
        gpu.unmap(ptr, page_bytes)


def test_adjacent_mappings_are_unmapped_together_but_not_partially(gpu: Gpu) -> None:
    page_bytes = gpu.granularity()
    ptr = gpu.reserve(3 * page_bytes)
    gpu.map(ptr, gpu.create(page_bytes), page_bytes)
    gpu.map(Ptr(ptr + page_bytes), gpu.create(2 * page_bytes), 2 * page_bytes)

    with refused(Status.INVALID_VALUE):
        gpu.unmap(ptr, 2 * page_bytes)
    with refused(Status.INVALID_VALUE):
        gpu.unmap(Ptr(ptr + 2 * page_bytes), page_bytes)
    gpu.unmap(ptr, 3 * page_bytes)
    gpu.map(ptr, gpu.create(3 * page_bytes), 3 * page_bytes)


def test_released_backing_is_invalid(gpu: Gpu) -> None:
    page_bytes = gpu.granularity()
    ptr, backing = gpu.reserve(page_bytes), gpu.create(page_bytes)
    gpu.release(backing)

    with refused(Status.INVALID_HANDLE):
        gpu.map(ptr, backing, page_bytes)
    with refused(Status.INVALID_HANDLE):
        gpu.release(backing)
