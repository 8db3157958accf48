"""Tests the plug for cuda.core on a real device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays.plugs.viewers import opened_by_all
from cuda import core

import cudakit

pytestmark = pytest.mark.gpu

MIB = 1 << 20
COUNT = 1 << 18
SOURCE = """
extern "C" __global__ void add(float *numbers, float value, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        numbers[i] += value;
}
"""


@pytest.fixture
def device() -> Any:
    device = core.Device(0)
    device.set_current()
    return device


@pytest.fixture
def resource(device: Any) -> Any:  # noqa: ARG001  it makes a context current
    return cudakit.CachingMemoryResource(0)


def on_host(buffer: Any, stream: Any) -> Any:
    pinned = core.LegacyPinnedMemoryResource().allocate(buffer.size)
    buffer.copy_to(pinned, stream=stream)
    stream.sync()
    return np.from_dlpack(pinned).view("f4").copy()


def test_kernels_on_buffers_compute_correctly_and_are_counted(
    device: Any, resource: Any, tmp_path: Path
) -> None:
    resource.allocator.record_history()
    options = core.ProgramOptions(arch=f"sm_{device.arch}")
    kernel = core.Program(SOURCE, "c++", options).compile("cubin").get_kernel("add")
    config = core.LaunchConfig(grid=COUNT // 256, block=256)
    streams = [device.create_stream() for _ in range(3)]

    for iteration in range(30):
        stream = streams[iteration % 3]
        with resource.allocate(4 * COUNT, stream=stream) as buffer:
            buffer.fill(0, stream=stream)
            core.launch(stream, config, kernel, buffer, np.float32(iteration), np.int32(COUNT))
            assert (on_host(buffer, stream) == iteration).all()

    statistics = resource.statistics()
    assert statistics["allocation.all.allocated"] == statistics["allocation.all.freed"] == 30
    assert statistics["segment.all.current"] == 3
    opened = opened_by_all(resource.snapshot(), tmp_path)
    assert any(
        "test_real_cuda_core" in frame.filename for row in opened.holders for frame in row.stack
    )


def test_device_allocates_from_the_resource(device: Any, resource: Any) -> None:
    stream, previous_resource = device.create_stream(), device.memory_resource
    device.memory_resource = resource
    try:
        with device.allocate(MIB, stream=stream) as buffer:
            assert buffer.memory_resource is resource
            assert buffer.device_id == 0
            assert resource.statistics()["allocated_bytes.all.current"] == MIB
    finally:
        device.memory_resource = previous_resource


def test_buffer_closed_on_another_stream_waits_for_it(device: Any, resource: Any) -> None:
    first, second = device.create_stream(), device.create_stream()
    buffer = resource.allocate(64 * MIB, stream=first)
    first.sync()
    for _ in range(200):
        buffer.fill(1, stream=second)

    buffer.close(second)

    statistics = resource.statistics()
    assert (statistics["allocation.all.current"], statistics["active.all.current"]) == (0, 1)
    second.sync()
    resource.allocate(512, stream=first).close()
    assert resource.statistics()["active.all.current"] == 0


def test_double_free_is_counted_and_not_raised(
    device: Any, resource: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = device.create_stream()
    resource.allocate(0, stream=stream).close()
    buffer = resource.allocate(100, stream=stream)
    resource.allocator.free(int(buffer.handle))

    buffer.close()

    assert len(resource.allocator.invalid_frees()) == 1
    assert capfd.readouterr().err == ""
