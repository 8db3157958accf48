"""``cudakit.pin`` on simulated devices and on a GPU."""

from __future__ import annotations

import doctest
import gc
import mmap
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import cudakit
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import LEGACY, Gpu, Ptr
from cudakit.gpu.open import open_gpu


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    with closing(open_gpu(request.param)) as gpu:
        yield gpu


def test_pinned_array_is_copied_in_both_directions(gpu: Gpu) -> None:
    source, target = np.arange(100_000, dtype=np.float32), np.zeros(100_000, np.float32)
    memory = gpu.malloc(source.nbytes)
    with cudakit.pin(source, device=gpu) as read, cudakit.pin(target, device=gpu) as written:
        stream = gpu.stream(blocking=False)
        gpu.copy(memory, read.ptr, read.size_bytes, stream)
        gpu.copy(written.ptr, memory, written.size_bytes, stream)
        gpu.sync_stream(stream)

        assert read.is_pinned
        assert read.size_bytes == 400_000
        assert read.array is source
    assert not read.is_pinned
    assert np.array_equal(source, target)


def test_memory_is_unpinned_after_the_work_that_uses_it(gpu: Gpu) -> None:
    target = np.zeros(1 << 20, np.uint8)
    memory = gpu.malloc(target.nbytes)
    gpu.fill(memory, 7, target.nbytes, LEGACY)

    with cudakit.pin(target, device=gpu) as pinned:
        gpu.copy(pinned.ptr, memory, target.nbytes, LEGACY)

    assert set(target.tolist()) == {7}


def test_array_that_is_already_pinned_is_rejected(gpu: Gpu) -> None:
    array = np.zeros(10_000)
    with cudakit.pin(array, device=gpu) as pinned:
        with pytest.raises(UsageError, match="already pinned: 80000 bytes"):
            cudakit.pin(array, device=gpu)
        assert pinned.is_pinned
    cudakit.pin(array, device=gpu).close()


def test_garbage_collection_unpins_memory(gpu: Gpu) -> None:
    array = np.zeros(10_000)
    pinned = cudakit.pin(array, device=gpu)
    del pinned
    gc.collect()

    cudakit.pin(array, device=gpu).close()


def test_memory_stays_allocated_while_it_is_pinned(gpu: Gpu) -> None:
    pinned = cudakit.pin(np.full(100_000, 3, np.uint8), device=gpu)
    memory = gpu.malloc(pinned.size_bytes)
    gc.collect()
    gpu.copy(memory, pinned.ptr, pinned.size_bytes, LEGACY)
    gpu.sync_stream(LEGACY)
    target = np.zeros(100_000, np.uint8)
    with cudakit.pin(target, device=gpu) as written:
        gpu.copy(written.ptr, memory, written.size_bytes, LEGACY)
    pinned.close()
    pinned.close()

    assert set(target.tolist()) == {3}


def test_every_buffer_can_be_pinned(gpu: Gpu) -> None:
    with mmap.mmap(-1, 8192) as mapped:
        for buffer in (bytearray(5000), memoryview(bytearray(5000)), mapped, np.zeros((3, 5, 7))):
            with cudakit.pin(buffer, device=gpu) as pinned:
                assert pinned.size_bytes == memoryview(buffer).nbytes
        gc.collect()


def test_read_only_array_needs_read_only_flag() -> None:
    array = np.zeros(100)
    array.flags.writeable = False
    for buffer in (array, b"text"):
        with pytest.raises(UsageError, match="read-only") as caught:
            cudakit.pin(buffer, device="sim")
        assert "read_only=True" in caught.value.hint
    with cudakit.pin(array, read_only=True, device="sim") as pinned:
        assert pinned.size_bytes == 800


@pytest.mark.parametrize("array", [np.zeros((4, 4))[:, ::2], np.zeros(0), 5, [1, 2]])
def test_objects_without_contiguous_memory_are_rejected(array: Any) -> None:
    with pytest.raises(UsageError):
        cudakit.pin(array, device="sim")


def test_only_pinned_memory_can_be_unpinned(gpu: Gpu) -> None:
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        gpu.unpin(Ptr(4096))


def test_closing_the_device_unpins_memory() -> None:
    array = np.zeros(1000)
    gpu = open_gpu("sim")
    pinned = cudakit.pin(array, device=gpu)
    gpu.close()
    pinned.close()

    assert not pinned.is_pinned


@pytest.mark.gpu
def test_torch_copies_pinned_array_without_blocking() -> None:
    torch = pytest.importorskip("torch")
    array = np.arange(1 << 20, dtype=np.float32)
    tensor = torch.from_numpy(array)
    with cudakit.pin(tensor) as pinned:
        assert tensor.is_pinned()
        assert pinned.ptr == tensor.data_ptr()
        on_gpu = tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(on_gpu.cpu(), tensor)
    assert not tensor.is_pinned()


@pytest.mark.gpu
def test_read_only_memory_is_copied_to_the_device() -> None:
    array = np.arange(1 << 16, dtype=np.uint8)
    array.flags.writeable = False
    try:
        pinned = cudakit.pin(array, read_only=True)
    except CudaError as error:
        pytest.skip(f"the device cannot pin memory as read-only: {error.message}")
    with pinned:
        assert pinned.size_bytes == 1 << 16


def test_example_of_pin_runs() -> None:
    module = __import__("cudakit.api.pin", fromlist=["pin"])
    results = doctest.testmod(module, extraglobs={"cudakit": cudakit})

    assert results.attempted >= 3
    assert results.failed == 0
