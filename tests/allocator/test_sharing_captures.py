"""Sharing and opening memory during a graph capture keep the capture valid."""

from __future__ import annotations

import pytest
from allocator.device import MIB
from allocator.two_processes import EXPANDING, PLAIN, Pair


@pytest.fixture(params=[PLAIN, EXPANDING], ids=["plain", "expanding"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def test_share_during_a_capture_keeps_the_capture_valid(pair: Pair) -> None:
    stream = pair.first.stream()
    block = pair.exporter.alloc(MIB)
    with pair.exporter.capture(stream=stream):
        pair.first.capture_begin(stream)
        shared = pair.exporter.share(block)
        graph = pair.first.capture_end(stream)

    assert pair.importer.open_shared(shared).size_bytes == MIB
    pair.first.instantiate(graph)


def test_memory_dropped_during_a_capture_is_closed_later(pair: Pair) -> None:
    stream = pair.second.stream()
    shared = pair.exporter.share(pair.exporter.alloc(MIB))
    memory = pair.importer.open_shared(shared)
    address = memory.ptr
    with pair.importer.capture(stream=stream):
        pair.second.capture_begin(stream)
        memory.close()
        graph = pair.second.capture_end(stream)
    assert pair.second.heap.space.region_at(address) is not None

    pair.second.instantiate(graph)
    pair.importer.open_shared(shared).close()
    assert pair.second.ipc.open_mappings == {}
    assert pair.second.virtual.mapped_memory == {}
