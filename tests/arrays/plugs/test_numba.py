from __future__ import annotations

import gc
import pickle
import sys
import weakref
from collections import namedtuple
from collections.abc import Callable
from ctypes import string_at
from types import SimpleNamespace
from typing import Any

import pytest
from arrays.plugs.allocating import BASE, Allocating
from numba_ready import WHY_NOT, numba_is_ready

from cudakit.arrays.plugs.numba import (
    UNUSED_STREAM,
    allocator_finder,
    manager_of,
    memory_manager,
    unpickle_handle,
)
from cudakit.errors import CudakitError, MissingDependency, UsageError
from cudakit.gpu.api import LEGACY

MemoryInfo = namedtuple("MemoryInfo", "free, total")


class Manager:
    """A fake of Numba's base class for memory managers."""

    def __init__(self, context: Any) -> None:
        self.context = context


class Pointer:
    """A fake of Numba's memory object, whose finalizer runs when it is garbage-collected."""

    def __init__(
        self, context: Any, pointer: Any, size: int, finalizer: Callable[[], None]
    ) -> None:
        self.context, self.ptr, self.size = context, pointer.value, size
        self.device_pointer_value = pointer.value or None
        weakref.finalize(self, finalizer)


class Handle:
    """A fake of Numba's IPC handle."""

    def __init__(
        self, base: Any, handle: Any, size: int, source_info: Any = None, offset: int = 0
    ) -> None:
        self.base, self.handle, self.size = base, handle, size
        self.source_info, self.offset = source_info, offset


class Context:
    def __init__(self, device: int) -> None:
        identity = {"pci_bus_id": 7}
        self.device = SimpleNamespace(id=device, get_device_identity=lambda: identity)


CUDA = SimpleNamespace(
    HostOnlyCUDAMemoryManager=Manager,
    MemoryPointer=Pointer,
    MemoryInfo=MemoryInfo,
    IpcHandle=Handle,
)


def manager(*allocators: Allocating, device: int = 0, default_stream_only: bool = False) -> Any:
    manager_class = manager_of(
        CUDA, allocator_finder(allocators), default_stream_only=default_stream_only
    )
    context = Context(device)
    memory_manager = manager_class(context=context)
    memory_manager.kept = context  # Numba keeps the context alive
    return memory_manager


def test_numba_free_is_a_use_by_the_default_stream() -> None:
    allocator = Allocating()

    memory = manager(allocator).memalloc(100)
    ptr = memory.ptr
    del memory
    gc.collect()

    assert allocator.allocated == [(100, UNUSED_STREAM)]
    assert allocator.freed == [(ptr, LEGACY)]


def test_memory_is_reused_at_once_with_default_stream_only() -> None:
    allocator = Allocating()

    memory = manager(allocator, default_stream_only=True).memalloc(100)
    ptr = memory.ptr
    del memory
    gc.collect()

    assert allocator.allocated == [(100, 0)]
    assert allocator.freed == [(ptr, None)]


def test_manager_uses_the_allocator_of_its_context() -> None:
    first, second = Allocating(0), Allocating(1)

    assert manager(first, second, device=1).allocator is second
    with pytest.raises(UsageError, match="no allocator was given for cuda:2"):
        manager(first, second, device=2).memalloc(1)


def test_manager_without_a_context_reports_its_version() -> None:
    def source(device: int) -> Allocating:
        raise AssertionError(device)

    manager_class = manager_of(CUDA, source, default_stream_only=False)

    assert manager_class(context=None).interface_version == 1


def test_manager_reports_memory_info_of_the_device() -> None:
    assert manager(Allocating()).get_memory_info() == (1 << 30, 2 << 30)


def test_ipc_handle_has_the_segment_and_the_offset() -> None:
    memory_manager = manager(Allocating())
    memory = memory_manager.memalloc(100)
    handle = memory_manager.get_ipc_handle(memory)

    assert handle.base is memory
    assert (handle.size, handle.offset) == (100, memory.ptr - BASE)
    assert handle.source_info == {"pci_bus_id": 7}
    assert string_at(handle.handle.getPtr(), 64) == b"a handle".ljust(64)


def test_ipc_handle_is_pickled_by_its_bytes() -> None:
    memory_manager = manager(Allocating())
    rebuild, (data, size, source, offset) = memory_manager.get_ipc_handle(
        memory_manager.memalloc(100)
    ).__reduce__()

    assert rebuild is unpickle_handle
    assert (data, size, source) == (b"a handle".ljust(64), 100, {"pci_bus_id": 7})
    assert offset > 0


def test_unsupported_ipc_handle_raises_error_of_the_allocator() -> None:
    allocator = Allocating()
    memory_manager = manager(allocator)
    memory = memory_manager.memalloc(100)
    allocator.refuses = CudakitError("it has no handle of")

    with pytest.raises(CudakitError, match="no handle of"):
        memory_manager.get_ipc_handle(memory)


@pytest.mark.skipif(not numba_is_ready(), reason=WHY_NOT)
def test_numba_handle_survives_pickling() -> None:
    from numba import cuda

    handle = unpickle_handle(bytes(range(64)), 10, {"pci_bus_id": 1}, 512)
    unpickled = pickle.loads(pickle.dumps(handle))  # noqa: S301  written right here

    assert isinstance(unpickled, cuda.IpcHandle)
    assert (unpickled.base, unpickled.size, unpickled.offset) == (None, 10, 512)
    assert string_at(unpickled.handle.getPtr(), 64) == bytes(range(64))


def test_without_numba_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)

    with pytest.raises(MissingDependency) as caught:
        memory_manager(allocator_finder([Allocating()]), default_stream_only=False)
    assert caught.value.hint == "pip install 'numba-cuda[cu13]'"
