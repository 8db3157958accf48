from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from arrays.plugs.allocating import Allocating

import cudakit
from cudakit.arrays.plugs.callbacks import rmm_resource, rmm_resource_of
from cudakit.errors import CudaError, MissingDependency


class Stream:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def callbacks(allocator: Allocating) -> Any:
    """Return a fake of RMM's resource, which exposes its two functions."""

    def make(allocate: Any, deallocate: Any) -> Any:
        return SimpleNamespace(allocate=allocate, deallocate=deallocate)

    return rmm_resource_of(SimpleNamespace(CallbackMemoryResource=make), allocator)


def test_rmm_streams_are_passed_on() -> None:
    allocator = Allocating()
    resource = callbacks(allocator)

    ptr = resource.allocate(100, Stream(5))
    resource.deallocate(ptr, 100, Stream(6))

    assert allocator.allocated == [(100, 5)]
    assert allocator.freed == [(ptr, 6)]


def test_out_of_memory_is_a_memory_error_for_rmm() -> None:
    allocator = Allocating()
    allocator.refuses = cudakit.OutOfMemory("1 GiB asked")

    with pytest.raises(MemoryError, match="1 GiB asked"):
        callbacks(allocator).allocate(1 << 30, Stream(0))


def test_other_errors_are_raised_unchanged() -> None:
    allocator = Allocating()
    allocator.refuses = CudaError(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "lost")

    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        callbacks(allocator).allocate(100, Stream(0))


def test_without_rmm_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rmm", None)
    monkeypatch.setitem(sys.modules, "rmm.mr", None)

    with pytest.raises(MissingDependency) as caught:
        rmm_resource(Allocating())
    assert caught.value.hint == "pip install 'rmm-cu13'"
