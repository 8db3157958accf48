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


def used(gpu: Sim) -> int:
    info = gpu.memory_info()
    return info.total_bytes - info.free_bytes


@pytest.fixture
def giver() -> Sim:
    return Sim(capacity_bytes=64 * MIB)


@pytest.fixture
def taker(giver: Sim) -> Sim:
    return Sim(capacity_bytes=64 * MIB, same_machine_as=giver)


def test_shared_memory_is_read_and_written_by_both_processes(giver: Sim, taker: Sim) -> None:
    ptr = giver.malloc(MIB)
    giver.fill(ptr, 5, MIB, LEGACY)
    giver.sync()
    mapped_ptr = taker.ipc_open(giver.ipc_handle(ptr))

    assert content(taker, mapped_ptr) == b"\5" * 4
    taker.fill(Ptr(mapped_ptr + 8), 6, 8, LEGACY)
    taker.sync()
    assert content(giver, ptr + 6) == b"\5\5\6\6"
    assert used(taker) == 0


def test_opened_memory_keeps_address_until_last_close(giver: Sim, taker: Sim) -> None:
    handle = giver.ipc_handle(giver.malloc(MIB))
    mapped_ptr = taker.ipc_open(handle)
    assert taker.ipc_open(handle) == mapped_ptr

    taker.ipc_close(mapped_ptr)
    content(taker, mapped_ptr)
    taker.ipc_close(mapped_ptr)
    with pytest.raises(CudaError, match=r"ILLEGAL_ADDRESS|INVALID_VALUE"):
        content(taker, mapped_ptr)


def test_process_on_another_machine_cannot_open_handle(giver: Sim) -> None:
    other_machine = Sim(capacity_bytes=64 * MIB)
    other_machine.ipc_handle(other_machine.malloc(MIB))

    assert other_machine.process != giver.process
    with pytest.raises(CudaError, match="of another Python process cannot be opened"):
        other_machine.ipc_open(giver.ipc_handle(giver.malloc(MIB)))


@pytest.mark.parametrize("ends", [False, True])
def test_freed_memory_is_invalid_in_processes_that_opened_it(
    giver: Sim, taker: Sim, *, ends: bool
) -> None:
    ptr = giver.malloc(MIB)
    handle = giver.ipc_handle(ptr)
    mapped_ptr = taker.ipc_open(handle)
    if ends:
        giver.close()
    else:
        giver.free(ptr)

    with pytest.raises(CudaError, match="INVALID_VALUE"):
        taker.ipc_open(handle)
    taker.ipc_close(mapped_ptr)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        taker.ipc_close(mapped_ptr)


def test_use_of_memory_freed_by_owner_is_illegal_address(giver: Sim, taker: Sim) -> None:
    ptr = giver.malloc(MIB)
    mapped_ptr = taker.ipc_open(giver.ipc_handle(ptr))
    giver.free(ptr)

    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        content(taker, mapped_ptr)


@pytest.mark.parametrize("kind", ["descriptor", "fabric"])
def test_shared_pages_live_while_any_process_has_them(giver: Sim, kind: HandleKind) -> None:
    taker = Sim(capacity_bytes=64 * MIB, same_machine_as=giver)
    base, backing = giver.reserve(PAGE), giver.create(PAGE, kind)
    giver.map(base, backing, PAGE)
    giver.fill(base, 9, PAGE, LEGACY)
    giver.sync()
    exported = giver.export(backing)
    reserved_ptr, imported = taker.reserve(PAGE), taker.import_backing(exported)
    taker.map(reserved_ptr, imported, PAGE)
    taker.release(imported)
    giver.unmap(base, PAGE)
    giver.release(backing)
    giver.revoke(exported)

    assert isinstance(exported, FabricHandle) == (kind == "fabric")
    assert (used(giver), used(taker)) == (PAGE, 0)
    assert content(taker, reserved_ptr) == b"\t" * 4
    taker.unmap(reserved_ptr, PAGE)
    assert used(giver) == 0


def test_ended_or_withdrawn_export_cannot_be_imported(giver: Sim, taker: Sim) -> None:
    backing = giver.create(PAGE, "descriptor")
    exported = giver.export(backing)
    giver.revoke(exported)
    with pytest.raises(EnvironmentUnusable, match="has freed the memory"):
        taker.import_backing(exported)

    exported = giver.export(backing)
    giver.close()
    with pytest.raises(EnvironmentUnusable, match="has ended"):
        taker.import_backing(exported)


def test_exports_are_distinct(giver: Sim) -> None:
    backing = giver.create(PAGE, "descriptor")

    assert giver.export(backing) != giver.export(backing)
    assert giver.process != Sim(same_machine_as=giver).process
