"""An allocator on a device in memory, and one on the simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from allocator import invariants
from allocator.device import Device
from allocator.work import Work

from cudakit.allocator.allocator import DeviceCachingAllocator


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def allocator(device: Device) -> Iterator[DeviceCachingAllocator]:
    instance = DeviceCachingAllocator(device)
    yield instance
    invariants.check(instance)


@pytest.fixture
def work() -> Iterator[Work]:
    with Work() as instance:
        yield instance
