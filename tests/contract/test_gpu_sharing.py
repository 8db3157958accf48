"""Tests memory sharing within one process; tests/gpu and tests/core test it with several processes."""

from __future__ import annotations

import numpy as np
import pytest
from contract.workbench import Workbench, refused

from cudakit.errors import Unsupported
from cudakit.gpu.api import HANDLE_BYTES, DescriptorHandle, Gpu, Ptr
from cudakit.gpu.driver_errors import Status


def test_allocations_have_distinct_stable_handles(gpu: Gpu) -> None:
    first, second = gpu.malloc(1 << 21), gpu.malloc(1 << 21)
    handle = gpu.ipc_handle(first)

    assert len(handle) == HANDLE_BYTES
    assert gpu.ipc_handle(first) == handle
    assert gpu.ipc_handle(second) != handle


def test_address_inside_allocation_has_no_handle(gpu: Gpu) -> None:
    ptr = gpu.malloc(1 << 21)
    page = gpu.granularity()
    mapped = gpu.reserve(page)
    gpu.map(mapped, gpu.create(page), page)

    for address in (Ptr(ptr + 512), mapped):
        with refused(Status.INVALID_VALUE):
            gpu.ipc_handle(address)
    gpu.free(ptr)
    with refused(Status.INVALID_VALUE):
        gpu.ipc_handle(ptr)


def test_process_cannot_open_own_ipc_handle(gpu: Gpu) -> None:
    handle = gpu.ipc_handle(gpu.malloc(1 << 21))

    with refused(Status.INVALID_CONTEXT):
        gpu.ipc_open(handle)


def test_invalid_or_closed_handle_is_refused(gpu: Gpu) -> None:
    with refused(Status.INVALID_VALUE):
        gpu.ipc_open(b"short")
    with refused(Status.INVALID_VALUE):
        gpu.ipc_close(gpu.malloc(512))


def test_imported_backing_shares_memory(bench: Workbench) -> None:
    gpu, page = bench.gpu, bench.gpu.granularity()
    if "descriptor" not in gpu.handle_kinds():
        pytest.skip("this device exports no file descriptors")
    first, second, backing = gpu.reserve(page), gpu.reserve(page), gpu.create(page, "descriptor")
    gpu.map(first, backing, page)
    exported = gpu.export(backing)
    gpu.map(second, gpu.import_backing(exported), page)
    bench.write(first, np.array([7], np.int32))

    assert isinstance(exported, DescriptorHandle)
    assert exported.process == gpu.process
    assert bench.read(second) == [7]


def test_exported_memory_lives_until_withdrawn_and_unmapped(gpu: Gpu) -> None:
    page = gpu.granularity()
    free_bytes_before = gpu.memory_info().free_bytes
    ptr, backing = gpu.reserve(page), gpu.create(page, "descriptor")
    gpu.map(ptr, backing, page)
    gpu.release(backing)
    mapped = gpu.backing_at(Ptr(ptr + page // 2))
    exported = gpu.export(mapped)
    gpu.release(mapped)
    gpu.unmap(ptr, page)

    assert gpu.memory_info().free_bytes <= free_bytes_before - page
    gpu.revoke(exported)
    assert gpu.memory_info().free_bytes == free_bytes_before
    gpu.revoke(exported)


def test_backing_without_handle_kind_cannot_be_exported(gpu: Gpu) -> None:
    backing = gpu.create(gpu.granularity())

    with pytest.raises(Unsupported, match="created without a shareable handle"):
        gpu.export(backing)


def test_unmapped_address_has_no_backing(gpu: Gpu) -> None:
    ptr = gpu.reserve(gpu.granularity())

    with refused(Status.INVALID_VALUE):
        gpu.backing_at(ptr)
