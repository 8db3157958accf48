"""Tests memory sharing between simulated processes of one machine."""

from __future__ import annotations

import pytest

from cudakit.errors import CudaError, EnvironmentUnusable
from cudakit.gpu.api import LEGACY, FabricHandle, HandleKind, Ptr
from cudakit.gpu.sim import Sim

MIB = 1 << 20
PAGE = 2 * MIB


def content(gpu: Sim, ptr: int, size_bytes: int = 4) -> bytes:
    host = gpu.host_malloc(size_bytes)
    gpu.copy(host, Ptr(ptr), size_bytes, LEGACY)
    gpu.sync()
    return bytes(gpu.host_view(host, size_bytes))


def used_bytes(gpu: Sim) -> int:
    info = gpu.memory_info()
    return info.total_bytes - info.free_bytes


@pytest.fixture
def exporter() -> Sim:
    return Sim(capacity_bytes=64 * MIB)


@pytest.fixture
def importer(exporter: Sim) -> Sim:
    return Sim(capacity_bytes=64 * MIB, same_machine_as=exporter)


def test_shared_memory_is_read_and_written_by_both_processes(exporter: Sim, importer: Sim) -> None:
    ptr = exporter.malloc(MIB)
    exporter.fill(ptr, 5, MIB, LEGACY)
    exporter.sync()
    mapped_ptr = importer.ipc_open(exporter.ipc_handle(ptr))

    assert content(importer, mapped_ptr) == b"\5" * 4
    importer.fill(Ptr(mapped_ptr + 8), 6, 8, LEGACY)
    importer.sync()
    assert content(exporter, ptr + 6) == b"\5\5\6\6"
    assert used_bytes(importer) == 0


def test_opened_memory_keeps_address_until_last_close(exporter: Sim, importer: Sim) -> None:
    handle = exporter.ipc_handle(exporter.malloc(MIB))
    mapped_ptr = importer.ipc_open(handle)
    assert importer.ipc_open(handle) == mapped_ptr

    importer.ipc_close(mapped_ptr)
    content(importer, mapped_ptr)
    importer.ipc_close(mapped_ptr)
    with pytest.raises(CudaError, match=r"ILLEGAL_ADDRESS|INVALID_VALUE"):
        content(importer, mapped_ptr)


def test_process_on_another_machine_cannot_open_handle(exporter: Sim) -> None:
    other_machine = Sim(capacity_bytes=64 * MIB)
    other_machine.ipc_handle(other_machine.malloc(MIB))

    assert other_machine.process != exporter.process
    with pytest.raises(CudaError, match="of another Python process cannot be opened"):
        other_machine.ipc_open(exporter.ipc_handle(exporter.malloc(MIB)))


@pytest.mark.parametrize("ends", [False, True])
def test_freed_memory_is_invalid_in_processes_that_opened_it(
    exporter: Sim, importer: Sim, *, ends: bool
) -> None:
    ptr = exporter.malloc(MIB)
    handle = exporter.ipc_handle(ptr)
    mapped_ptr = importer.ipc_open(handle)
    if ends:
        exporter.close()
    else:
        exporter.free(ptr)

    with pytest.raises(CudaError, match="INVALID_VALUE"):
        importer.ipc_open(handle)
    importer.ipc_close(mapped_ptr)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        importer.ipc_close(mapped_ptr)


def test_use_of_memory_freed_by_owner_is_illegal_address(exporter: Sim, importer: Sim) -> None:
    ptr = exporter.malloc(MIB)
    mapped_ptr = importer.ipc_open(exporter.ipc_handle(ptr))
    exporter.free(ptr)

    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        content(importer, mapped_ptr)


@pytest.mark.parametrize("kind", ["descriptor", "fabric"])
def test_shared_pages_live_while_any_process_has_them(exporter: Sim, kind: HandleKind) -> None:
    importer = Sim(capacity_bytes=64 * MIB, same_machine_as=exporter)
    base, backing = exporter.reserve(PAGE), exporter.create(PAGE, kind)
    exporter.map(base, backing, PAGE)
    exporter.fill(base, 9, PAGE, LEGACY)
    exporter.sync()
    exported = exporter.export(backing)
    reserved_ptr, imported = importer.reserve(PAGE), importer.import_backing(exported)
    importer.map(reserved_ptr, imported, PAGE)
    importer.release(imported)
    exporter.unmap(base, PAGE)
    exporter.release(backing)
    exporter.revoke(exported)

    assert isinstance(exported, FabricHandle) == (kind == "fabric")
    assert (used_bytes(exporter), used_bytes(importer)) == (PAGE, 0)
    assert content(importer, reserved_ptr) == b"\t" * 4
    importer.unmap(reserved_ptr, PAGE)
    assert used_bytes(exporter) == 0


def test_ended_or_withdrawn_export_cannot_be_imported(exporter: Sim, importer: Sim) -> None:
    backing = exporter.create(PAGE, "descriptor")
    exported = exporter.export(backing)
    exporter.revoke(exported)
    with pytest.raises(EnvironmentUnusable, match="has freed the memory"):
        importer.import_backing(exported)

    exported = exporter.export(backing)
    exporter.close()
    with pytest.raises(EnvironmentUnusable, match="has ended"):
        importer.import_backing(exported)


def test_exports_are_distinct(exporter: Sim) -> None:
    backing = exporter.create(PAGE, "descriptor")

    assert exporter.export(backing) != exporter.export(backing)
    assert exporter.process != Sim(same_machine_as=exporter).process
