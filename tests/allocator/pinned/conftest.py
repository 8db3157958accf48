"""A host in memory and a pool of each kind on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from allocator.pinned import invariants
from allocator.pinned.host import Host

from cudakit.allocator.pinned import CachingHostAllocator


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def pool(host: Host) -> Iterator[CachingHostAllocator]:
    allocator = CachingHostAllocator(host)
    yield allocator
    invariants.check(allocator, host)
