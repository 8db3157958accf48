from __future__ import annotations

import gc
import sys
import weakref
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from gpu.plugs.allocating import Allocating

from cudakit.errors import MissingDependency, UsageError
from cudakit.gpu.api import LEGACY
from cudakit.gpu.plugs.numba import NOBODYS, among, manager_of, memory_manager

MemoryInfo = namedtuple("MemoryInfo", "free, total")


class Manager:
    """Numba's base of managers that leave memory of the host to it."""

    def __init__(self, context: Any) -> None:
        self.context = context


class Pointer:
    """Numba's memory: its finalizer runs when nobody has it any more."""

    def __init__(
        self, context: Any, pointer: Any, size: int, finalizer: Callable[[], None]
    ) -> None:
        self.context, self.ptr, self.size = context, pointer.value, size
        weakref.finalize(self, finalizer)


class Context:
    def __init__(self, device: int) -> None:
        self.device = SimpleNamespace(id=device)


CUDA = SimpleNamespace(
    HostOnlyCUDAMemoryManager=Manager, MemoryPointer=Pointer, MemoryInfo=MemoryInfo
)


def manager(*allocators: Allocating, device: int = 0, default_stream_only: bool = False) -> Any:
    made = manager_of(CUDA, among(allocators), default_stream_only=default_stream_only)
    context = Context(device)
    found = made(context=context)
    found.kept = context  # Numba keeps it
    return found


def test_what_is_freed_counts_as_used_by_the_default_stream_until_then() -> None:
    allocator = Allocating()

    memory = manager(allocator).memalloc(100)
    ptr = memory.ptr
    del memory
    gc.collect()

    assert allocator.allocated == [(100, NOBODYS)]
    assert allocator.freed == [(ptr, LEGACY)]


def test_with_the_default_stream_alone_it_is_free_at_once() -> None:
    allocator = Allocating()

    memory = manager(allocator, default_stream_only=True).memalloc(100)
    ptr = memory.ptr
    del memory
    gc.collect()

    assert allocator.allocated == [(100, 0)]
    assert allocator.freed == [(ptr, None)]


def test_a_context_has_the_allocator_of_its_device() -> None:
    first, second = Allocating(0), Allocating(1)

    assert manager(first, second, device=1).allocator is second
    with pytest.raises(UsageError, match="memory of cuda:2"):
        manager(first, second, device=2).memalloc(1)


def test_a_manager_without_a_context_says_its_version_and_opens_nothing() -> None:
    def source(device: int) -> Allocating:
        raise AssertionError(device)

    made = manager_of(CUDA, source, default_stream_only=False)

    assert made(context=None).interface_version == 1


def test_memory_info_is_that_of_the_device() -> None:
    assert manager(Allocating()).get_memory_info() == (1 << 30, 2 << 30)


def test_memory_is_not_shared_with_other_processes() -> None:
    with pytest.raises(NotImplementedError, match="other processes"):
        manager(Allocating()).get_ipc_handle(None)


def test_without_numba_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)

    with pytest.raises(MissingDependency) as caught:
        memory_manager(among([Allocating()]), default_stream_only=False)
    assert caught.value.hint == "pip install 'numba-cuda[cu13]'"
