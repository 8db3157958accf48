from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from contract.workbench import Workbench, refused

from cudakit.gpu.api import LEGACY, Gpu, Ptr
from cudakit.gpu.driver_errors import Status
from cudakit.units import format_bytes

MIB = 1 << 20


def test_written_memory_is_read_back(bench: Workbench) -> None:
    values = np.random.default_rng(7).integers(0, 256, 3 * MIB + 5, dtype=np.uint8)
    ptr = bench.gpu.malloc(values.nbytes)

    bench.write(ptr, values)

    assert bench.read_bytes(ptr, values.nbytes) == values.tobytes()


def test_fill_writes_only_its_range(bench: Workbench) -> None:
    ptr = bench.gpu.malloc(100)
    bench.gpu.fill(ptr, 0x11, 100, LEGACY)

    bench.gpu.fill(Ptr(ptr + 3), 0xA5, 50, LEGACY)

    assert bench.read_bytes(ptr, 100) == b"\x11" * 3 + b"\xa5" * 50 + b"\x11" * 47


@pytest.mark.parametrize("value", [-1, 256])
def test_fill_value_must_be_byte(gpu: Gpu, value: int) -> None:
    ptr = gpu.malloc(4)

    with refused(Status.INVALID_VALUE) as caught:
        gpu.fill(ptr, value, 4, LEGACY)
    assert str(value) in caught.value.message


def test_copies_and_fills_are_stream_ordered(bench: Workbench) -> None:
    gpu, stream = bench.gpu, bench.gpu.stream()
    first, second = gpu.malloc(64), gpu.malloc(64)
    bench.spin(stream)
    gpu.fill(first, 1, 64, stream)
    gpu.copy(second, first, 64, stream)
    gpu.fill(first, 2, 64, stream)

    assert bench.read_bytes(second, 64) == b"\1" * 64
    assert bench.read_bytes(first, 64) == b"\2" * 64


def test_pinned_memory_is_copied_to_and_from_and_between(bench: Workbench) -> None:
    gpu = bench.gpu
    first, second = gpu.host_malloc(16), gpu.host_malloc(16)
    gpu.host_view(first, 16)[:] = bytes(range(16))

    gpu.copy(second, first, 16, LEGACY)
    gpu.sync()

    assert bytes(gpu.host_view(second, 16)) == bytes(range(16))


def test_pinned_memory_view_ends_with_allocation(gpu: Gpu) -> None:
    ptr = gpu.host_malloc(16)
    gpu.host_view(ptr, 16)[:] = bytes(16)
    gpu.host_view(ptr, 4)[:] = b"abcd"

    assert bytes(gpu.host_view(ptr, 16)) == b"abcd" + bytes(12)
    with refused(Status.INVALID_VALUE):
        gpu.host_view(ptr, 17)


def test_pageable_memory_is_copied_to_and_from_and_between(bench: Workbench) -> None:
    gpu, size = bench.gpu, 3 * MIB + 5
    values = np.random.default_rng(8).integers(0, 256, size, dtype=np.uint8).tobytes()
    first, second = (gpu.host_malloc(size, pinned=False) for _ in range(2))
    ptr = gpu.malloc(size)
    gpu.host_view(first, size)[:] = values

    gpu.copy(ptr, first, size, LEGACY)
    gpu.copy(second, ptr, size, LEGACY)
    assert bench.read_bytes(ptr, size) == values
    assert bytes(gpu.host_view(second, size)) == values
    gpu.host_view(second, size)[:] = bytes(size)
    gpu.copy(second, first, size, LEGACY)
    gpu.sync()

    assert bytes(gpu.host_view(second, size)) == values


@pytest.mark.parametrize("size", [4096, 8 * MIB])
def test_copy_to_pageable_memory_is_synchronous(bench: Workbench, size: int) -> None:
    # The copy is staged and may be synchronous (CUDA Driver API, "API synchronization behavior").
    gpu, stream = bench.gpu, bench.gpu.stream(blocking=False)
    ptr, pageable = gpu.malloc(size), gpu.host_malloc(size, pinned=False)
    gpu.fill(ptr, 1, size, stream)
    bench.spin(stream)
    gpu.fill(ptr, 2, size, stream)

    gpu.copy(pageable, ptr, size, stream)

    assert bytes(gpu.host_view(pageable, size)) == b"\2" * size


@pytest.mark.parametrize("size", [4096, 8 * MIB])
def test_pageable_source_may_change_after_copy_returns(bench: Workbench, size: int) -> None:
    gpu, stream = bench.gpu, bench.gpu.stream(blocking=False)
    ptr, pageable = gpu.malloc(size), gpu.host_malloc(size, pinned=False)
    gpu.host_view(pageable, size)[:] = b"\1" * size
    bench.spin(stream)

    gpu.copy(ptr, pageable, size, stream)
    gpu.host_view(pageable, size)[:] = b"\2" * size

    assert bench.read_bytes(ptr, size) == b"\1" * size


def test_pageable_memory_view_ends_with_allocation(gpu: Gpu) -> None:
    ptr = gpu.host_malloc(16, pinned=False)
    gpu.host_view(ptr, 4)[:] = b"abcd"

    assert bytes(gpu.host_view(ptr, 16)[:4]) == b"abcd"
    with refused(Status.INVALID_VALUE):
        gpu.host_view(ptr, 17)
    gpu.host_free(ptr)
    with refused(Status.INVALID_VALUE):
        gpu.host_free(ptr)


def test_zero_bytes_copied_or_filled_do_nothing(bench: Workbench) -> None:
    source_array, target_array = bench.ints(1), bench.ints(2)

    bench.gpu.copy(source_array, target_array, 0, LEGACY)
    bench.gpu.fill(source_array, 0xFF, 0, LEGACY)

    assert bench.read(source_array) == [1]


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_allocation_of_zero_or_negative_bytes_is_refused(gpu: Gpu, size_bytes: int) -> None:
    with refused(Status.INVALID_VALUE):
        gpu.malloc(size_bytes)
    with refused(Status.INVALID_VALUE):
        gpu.malloc(size_bytes, LEGACY)
    with refused(Status.INVALID_VALUE):
        gpu.host_malloc(size_bytes)
    with refused(Status.INVALID_VALUE):
        gpu.host_malloc(size_bytes, pinned=False)


def test_allocations_do_not_overlap(gpu: Gpu) -> None:
    sizes = [1, 511, 512, 513, MIB, 2 * MIB, 3 * MIB + 1]
    address_ranges = sorted((gpu.malloc(size), size) for size in sizes)

    assert all(ptr + size <= next_ptr for (ptr, size), (next_ptr, _) in pairwise(address_ranges))


def test_allocation_is_aligned_for_every_type(gpu: Gpu) -> None:
    # Allocations are aligned to at least 256 bytes (CUDA C++ Programming Guide, "Device Memory Accesses").
    assert all(gpu.malloc(size) % 256 == 0 for size in (1, 3, 257))


def test_memory_info_counts_allocations_until_freed(gpu: Gpu) -> None:
    memory_before = gpu.memory_info()
    ptr = gpu.malloc(256 * MIB)
    info_while_allocated = gpu.memory_info()
    gpu.free(ptr)

    assert memory_before.free_bytes - info_while_allocated.free_bytes >= 256 * MIB
    assert gpu.memory_info().free_bytes == memory_before.free_bytes
    assert (
        0
        < info_while_allocated.free_bytes
        < info_while_allocated.total_bytes
        == memory_before.total_bytes
    )


def test_out_of_memory_reports_sizes(gpu: Gpu) -> None:
    requested = 2 * gpu.memory_info().total_bytes
    stream = gpu.stream()

    with refused(Status.OUT_OF_MEMORY) as refusal:
        gpu.malloc(requested)
    with refused(Status.OUT_OF_MEMORY) as stream_ordered:
        gpu.malloc(requested, stream)
    for caught in (refusal, stream_ordered):
        assert f"{format_bytes(requested)} requested" in caught.value.message
        assert "free on" in caught.value.message
        assert caught.value.hint


def test_smaller_allocation_succeeds_after_out_of_memory(bench: Workbench) -> None:
    with refused(Status.OUT_OF_MEMORY):
        bench.gpu.malloc(2 * bench.gpu.memory_info().total_bytes)

    assert bench.read(bench.ints(5)) == [5]


def test_memory_freed_twice_is_refused(gpu: Gpu) -> None:
    ptr = gpu.malloc(512)
    gpu.free(ptr)

    with refused(Status.INVALID_VALUE) as caught:
        gpu.free(ptr)
    assert f"{ptr:#x}" in caught.value.message


def test_stream_ordered_memory_freed_twice_is_refused(gpu: Gpu) -> None:
    stream = gpu.stream()
    ptr = gpu.malloc(512, stream)
    gpu.free(ptr, stream)

    with refused(Status.INVALID_VALUE):
        gpu.free(ptr, stream)


def test_pinned_memory_freed_twice_is_refused(gpu: Gpu) -> None:
    ptr = gpu.host_malloc(512)
    gpu.host_free(ptr)

    with refused(Status.INVALID_VALUE):
        gpu.host_free(ptr)


def test_unknown_address_cannot_be_freed(gpu: Gpu) -> None:
    ptr = gpu.malloc(512)

    with refused(Status.INVALID_VALUE):
        gpu.free(Ptr(ptr + 8))
    with refused(Status.INVALID_VALUE):
        gpu.free(gpu.host_malloc(8))
    with refused(Status.INVALID_VALUE):
        gpu.host_free(ptr)


def test_stream_ordered_memory_is_usable_in_stream_order(bench: Workbench) -> None:
    gpu, stream = bench.gpu, bench.gpu.stream()
    result = bench.ints(0)

    ptr = gpu.malloc(4, stream)
    bench.store(ptr, 9, stream)
    bench.move(result, ptr, stream)
    gpu.free(ptr, stream)

    assert bench.read(result) == [9]


def test_allocation_can_be_freed_in_stream_that_waited(bench: Workbench) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    result = bench.ints(0)

    ptr = gpu.malloc(4, first)
    bench.spin(first)
    bench.store(ptr, 3, first)
    gpu.wait(second, bench.recorded(first))
    bench.move(result, ptr, second)
    gpu.free(ptr, second)

    assert bench.read(result) == [3]


def test_both_kinds_of_memory_can_be_freed_both_ways(gpu: Gpu) -> None:
    # The order of the free is documented in the CUDA C++ Programming Guide, "Stream Ordered Memory
    # Allocator".
    stream = gpu.stream()
    stream_ordered, refusal = gpu.malloc(64, stream), gpu.malloc(64)
    gpu.sync()

    gpu.free(stream_ordered)
    gpu.free(refusal, stream)

    for ptr in (stream_ordered, refusal):
        with refused(Status.INVALID_VALUE):
            gpu.free(ptr)


@pytest.mark.parametrize("threads", [1, 4])
def test_registered_memory_is_pinned_and_keeps_content(bench: Workbench, threads: int) -> None:
    gpu, size = bench.gpu, 3 * MIB + 5
    values = np.random.default_rng(9).integers(0, 256, size, dtype=np.uint8).tobytes()
    ptr, host = gpu.malloc(size), gpu.host_malloc(size, pinned=False)
    gpu.host_view(host, size)[:] = values

    gpu.host_register(host, thread_count=threads)
    assert bytes(gpu.host_view(host, size)) == values
    gpu.copy(ptr, host, size, LEGACY)
    assert bench.read_bytes(ptr, size) == values
    gpu.host_unregister(host)
    assert bytes(gpu.host_view(host, size)) == values
    gpu.host_free(host)
    gpu.free(ptr)


def test_kernels_access_registered_memory_at_host_address(bench: Workbench) -> None:
    gpu, host = bench.gpu, bench.gpu.host_malloc(4096, pinned=False)
    gpu.host_register(host)
    gpu.host_view(host, 4)[:] = bytes(4)
    bench.store(host, 7, LEGACY)
    gpu.sync()

    assert bytes(gpu.host_view(host, 4)) == b"\7\0\0\0"


def test_copy_to_registered_memory_is_stream_ordered(bench: Workbench) -> None:
    gpu, stream = bench.gpu, bench.gpu.stream(blocking=False)
    ptr, host = gpu.malloc(64), gpu.host_malloc(64, pinned=False)
    gpu.host_register(host)
    gpu.capture_begin(stream)
    gpu.copy(host, ptr, 64, stream)  # pageable copies cannot be captured

    gpu.destroy_graph(gpu.capture_end(stream))


def test_only_unregistered_pageable_memory_can_be_registered(gpu: Gpu) -> None:
    pageable, pinned, device = (
        gpu.host_malloc(64, pinned=False),
        gpu.host_malloc(64),
        gpu.malloc(64),
    )
    gpu.host_register(pageable)

    for ptr in (pageable, pinned, device, Ptr(pageable + 8)):
        with refused(Status.INVALID_VALUE):
            gpu.host_register(ptr)
    for ptr in (pinned, device, Ptr(pageable + 8)):
        with refused(Status.INVALID_VALUE):
            gpu.host_unregister(ptr)
    gpu.host_unregister(pageable)
    with refused(Status.INVALID_VALUE):
        gpu.host_unregister(pageable)


def test_registered_memory_must_be_unregistered_before_free(gpu: Gpu) -> None:
    ptr = gpu.host_malloc(64, pinned=False)
    gpu.host_register(ptr)
    with refused(Status.INVALID_VALUE) as caught:
        gpu.host_free(ptr)
    assert "unregister it first" in caught.value.message
    gpu.host_unregister(ptr)
    gpu.host_free(ptr)


def test_device_closes_with_registered_host_memory(gpu: Gpu) -> None:
    gpu.host_register(gpu.host_malloc(64, pinned=False))
    gpu.close()
