"""Tests the plug for RMM on a real device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from arrays.plugs.viewers import opened_by_all

import cudakit

pytestmark = pytest.mark.gpu


@pytest.fixture
def rmm() -> Any:
    pytest.importorskip("rmm.mr")
    return pytest.importorskip("rmm")


@contextmanager
def rmm_uses(rmm: Any, allocator: cudakit.CachingAllocator) -> Iterator[None]:
    previous_resource = rmm.mr.get_current_device_resource()
    rmm.mr.set_current_device_resource(cudakit.rmm_resource(allocator))
    try:
        yield
    finally:
        rmm.mr.set_current_device_resource(previous_resource)


def test_rmm_buffers_are_counted(rmm: Any, tmp_path: Path) -> None:
    allocator = cudakit.CachingAllocator(0)
    allocator.record_history()
    with rmm_uses(rmm, allocator):
        buffer = rmm.DeviceBuffer.to_device(b"cudakit" * 1000)
    assert buffer.tobytes() == b"cudakit" * 1000
    assert allocator.statistics()["requested_bytes.all.current"] == 7000
    opened = opened_by_all(allocator.snapshot(), tmp_path)
    assert opened.peak.requested_bytes == 7000
    del buffer
    assert allocator.statistics()["allocation.all.current"] == 0


def test_out_of_memory_becomes_rmms_error(rmm: Any) -> None:
    allocator = cudakit.CachingAllocator(0, settings="per_process_memory_fraction:0.01")
    size = allocator.memory_info().total_bytes // 50

    with rmm_uses(rmm, allocator), pytest.raises(MemoryError):
        rmm.DeviceBuffer(size=size)
