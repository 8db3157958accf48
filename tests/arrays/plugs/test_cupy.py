from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from arrays.plugs.allocating import Allocating

from cudakit.arrays.plugs.callbacks import cupy_function, cupy_function_of
from cudakit.errors import MissingDependency, UsageError


class Memory:
    """CuPy's memory object of one allocation, which frees it when deleted."""

    def __init__(self, ptr: int, device: int, free: Callable[[int, int], None]) -> None:
        self.ptr, self._device, self._free = ptr, device, free

    def __del__(self) -> None:
        if self.ptr:
            self._free(self.ptr, self._device)


class Cupy:
    """A fake of CuPy's allocation functions; ``device`` and ``stream`` are the current device and stream."""

    def __init__(self) -> None:
        self.device = 0
        self.stream = 0
        self.cuda = SimpleNamespace(
            get_current_stream=lambda: SimpleNamespace(ptr=self.stream),
            PythonFunctionAllocator=self._function_allocator,
        )

    def _function_allocator(self, malloc: Any, free: Any) -> Any:
        def allocate(size: int) -> Memory:
            ptr = malloc(size, self.device) if size else 0
            return Memory(ptr, self.device, free)

        return SimpleNamespace(malloc=allocate)


def test_cupy_memory_belongs_to_the_current_stream() -> None:
    cupy, allocator = Cupy(), Allocating()
    malloc = cupy_function_of(cupy, [allocator])

    cupy.stream = 0x1234
    memory = malloc(100)
    cupy.stream = 0
    ptr = memory.ptr
    del memory

    assert allocator.allocated == [(100, 0x1234)]
    assert allocator.freed == [(ptr, None)]


def test_cupy_memory_belongs_to_the_current_device() -> None:
    cupy, first, second = Cupy(), Allocating(0), Allocating(1)
    malloc = cupy_function_of(cupy, [first, second])

    cupy.device = 1
    memory = malloc(100)
    cupy.device = 0
    del memory

    assert (first.allocated, len(second.allocated), len(second.freed)) == ([], 1, 1)


def test_device_without_an_allocator_is_refused() -> None:
    cupy = Cupy()
    cupy.device = 1

    with pytest.raises(UsageError, match="no allocator was given for cuda:1"):
        cupy_function_of(cupy, [Allocating(0)])(100)


def test_cupy_zero_bytes_call_no_allocator() -> None:
    allocator = Allocating()

    assert cupy_function_of(Cupy(), [allocator])(0).ptr == 0
    assert (allocator.allocated, allocator.freed) == ([], [])


def test_free_uses_the_current_method_of_the_allocator() -> None:
    allocator, ignored = Allocating(), []
    memory = cupy_function_of(Cupy(), [allocator])(100)

    allocator.free = lambda *arguments: ignored.append(arguments)  # type: ignore[method-assign]
    ptr = memory.ptr
    del memory

    assert (allocator.freed, ignored) == ([], [(ptr,)])


def test_without_cupy_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)

    with pytest.raises(MissingDependency) as caught:
        cupy_function([Allocating()])
    assert caught.value.hint == "pip install 'cupy-cuda13x'"
