from __future__ import annotations

import pytest
from arrays.plugs.allocating import Allocating

from cudakit.arrays.plugs.callbacks import AllocatorByDevice
from cudakit.errors import UsageError


def test_allocators_are_found_by_device() -> None:
    first, second = Allocating(0), Allocating(1)

    devices = AllocatorByDevice([second, first])

    assert (devices[0], devices[1]) == (first, second)


def test_device_without_an_allocator_is_refused_with_a_hint() -> None:
    devices = AllocatorByDevice([Allocating(0), Allocating(2)])

    with pytest.raises(UsageError, match="cuda:1, only for cuda:0, cuda:2") as caught:
        devices[1]
    assert caught.value.hint == "add cudakit.CachingAllocator(1)"


def test_two_allocators_for_a_device_are_refused() -> None:
    with pytest.raises(UsageError, match="two allocators were given for cuda:1"):
        AllocatorByDevice([Allocating(1), Allocating(1)])


def test_missing_allocators_are_refused() -> None:
    with pytest.raises(UsageError, match="no allocator was given"):
        AllocatorByDevice([])
