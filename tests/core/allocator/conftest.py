"""An allocator on a device in memory, and one on the simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from core.allocator import law
from core.allocator.device import Device
from core.allocator.work import Work

from cudakit.core.allocator.allocator import CachingAllocator


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def allocator(device: Device) -> Iterator[CachingAllocator]:
    made = CachingAllocator(device)
    yield made
    law.check(made)


@pytest.fixture
def work() -> Iterator[Work]:
    with Work() as made:
        yield made
