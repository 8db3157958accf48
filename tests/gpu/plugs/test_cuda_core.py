"""With cuda.core as it is, which needs no GPU as long as its buffers are not said to be memory of one."""

from __future__ import annotations

import gc

import pytest
from cuda.core import Buffer, MemoryResource, Stream
from gpu.plugs.allocating import Allocating

from cudakit.errors import CudaError
from cudakit.gpu.plugs.cuda_core import AllocatorResource


class OnHost(AllocatorResource):
    """The resource, but for what it says of its memory: for that of a device cuda.core asks the driver."""

    @property
    def is_device_accessible(self) -> bool:
        return False


FIRST, SECOND = Stream.from_handle(0x1000), Stream.from_handle(0x2000)


@pytest.fixture
def allocator() -> Allocating:
    return Allocating()


def test_it_is_a_resource_of_memory_of_the_device(allocator: Allocating) -> None:
    resource = AllocatorResource(allocator)

    assert isinstance(resource, MemoryResource)
    assert (resource.device_id, resource.allocator) == (0, allocator)
    said = (resource.is_device_accessible, resource.is_host_accessible, resource.is_managed)
    assert said == (True, False, False)


def test_a_buffer_is_allocated_on_its_stream_and_closed_on_another(allocator: Allocating) -> None:
    buffer = OnHost(allocator).allocate(100, stream=FIRST)
    ptr = int(buffer.handle)
    assert (type(buffer), buffer.size) == (Buffer, 100)

    buffer.close(SECOND)
    buffer.close()

    assert allocator.allocated == [(100, 0x1000)]
    assert allocator.freed == [(ptr, 0x2000)]


def test_a_buffer_that_nobody_has_any_more_gives_its_memory_back(allocator: Allocating) -> None:
    resource = OnHost(allocator)
    resource.allocate(100, stream=FIRST)
    gc.collect()

    assert allocator.live == set()


def test_a_buffer_of_no_bytes_is_one(allocator: Allocating) -> None:
    buffer = OnHost(allocator).allocate(0, stream=FIRST)

    assert (buffer.size, int(buffer.handle)) == (0, 0)
    buffer.close(FIRST)


def test_a_free_that_is_refused_is_not_raised(
    allocator: Allocating, capfd: pytest.CaptureFixture[str]
) -> None:
    resource = OnHost(allocator)
    buffer = resource.allocate(100, stream=FIRST)
    allocator.free(int(buffer.handle))

    buffer.close(FIRST)
    resource.deallocate(0xBAD, 100, stream=FIRST)

    assert capfd.readouterr().err == ""


def test_memory_for_which_there_is_no_buffer_is_not_lost(allocator: Allocating) -> None:
    class NoStream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 0x3000

    with pytest.raises(TypeError):
        OnHost(allocator).allocate(100, stream=NoStream())  # type: ignore[arg-type,unused-ignore]
    assert allocator.live == set()


def test_out_of_memory_is_raised_as_it_is(allocator: Allocating) -> None:
    allocator.refuses = CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "1 GiB asked")

    with pytest.raises(CudaError, match="1 GiB asked"):
        OnHost(allocator).allocate(1 << 30, stream=FIRST)


def test_what_is_known_of_its_memory_is_the_allocators(allocator: Allocating) -> None:
    resource = OnHost(allocator)
    buffer = resource.allocate(100, stream=FIRST)

    assert resource.statistics() == {"allocation.all.current": 1}
    assert resource.snapshot() == {"segments": []}
    buffer.close(FIRST)
