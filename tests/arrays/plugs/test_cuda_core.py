"""Tests with the real cuda.core, which needs no GPU if its buffers are not device memory."""

from __future__ import annotations

import gc

import pytest
from arrays.plugs.allocating import Allocating
from cuda.core import Buffer, MemoryResource, Stream

from cudakit.arrays.plugs.buffers import Calls
from cudakit.arrays.plugs.cuda_core import AllocatorResource
from cudakit.errors import CudaError


class OnHost(AllocatorResource):
    """The resource, whose memory is not device memory: otherwise cuda.core would query the driver."""

    is_device_accessible = False


class InPython(OnHost):
    """The same resource with the calls in Python, even if the C extension is built."""

    allocate = Calls.allocate
    deallocate = Calls.deallocate


FIRST, SECOND = Stream.from_handle(0x1000), Stream.from_handle(0x2000)


@pytest.fixture(params=[OnHost, InPython])
def kind(request: pytest.FixtureRequest) -> type[AllocatorResource]:
    resource_class: type[AllocatorResource] = request.param
    return resource_class


@pytest.fixture
def allocator() -> Allocating:
    return Allocating()


def test_resource_is_a_memory_resource_of_the_device(allocator: Allocating) -> None:
    resource = AllocatorResource(allocator)

    assert isinstance(resource, MemoryResource)
    assert (resource.device_id, resource.allocator) == (0, allocator)
    accessibility = (
        resource.is_device_accessible,
        resource.is_host_accessible,
        resource.is_managed,
    )
    assert accessibility == (True, False, False)


def test_buffer_is_allocated_on_its_stream_and_closed_on_another(
    kind: type[AllocatorResource], allocator: Allocating
) -> None:
    buffer = kind(allocator).allocate(100, stream=FIRST)
    ptr = int(buffer.handle)
    assert (type(buffer), buffer.size) == (Buffer, 100)

    buffer.close(SECOND)
    buffer.close()

    assert allocator.allocated == [(100, 0x1000)]
    assert allocator.freed == [(ptr, 0x2000)]


def test_collected_buffer_is_freed(kind: type[AllocatorResource], allocator: Allocating) -> None:
    resource = kind(allocator)
    resource.allocate(100, stream=FIRST)
    gc.collect()

    assert allocator.live == set()


def test_buffer_of_zero_bytes_has_null_address(
    kind: type[AllocatorResource], allocator: Allocating
) -> None:
    buffer = kind(allocator).allocate(0, stream=FIRST)

    assert (buffer.size, int(buffer.handle)) == (0, 0)
    buffer.close(FIRST)


def test_refused_free_is_not_raised(
    kind: type[AllocatorResource], allocator: Allocating, capfd: pytest.CaptureFixture[str]
) -> None:
    resource = kind(allocator)
    buffer = resource.allocate(100, stream=FIRST)
    allocator.free(int(buffer.handle))

    buffer.close(FIRST)
    resource.deallocate(0xBAD, 100, stream=FIRST)

    assert capfd.readouterr().err == ""


def test_memory_is_freed_if_no_buffer_can_be_created(
    kind: type[AllocatorResource], allocator: Allocating
) -> None:
    class NoStream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 0x3000

    with pytest.raises(TypeError):
        kind(allocator).allocate(100, stream=NoStream())  # type: ignore[arg-type,unused-ignore]
    assert allocator.live == set()


def test_out_of_memory_is_raised_unchanged(
    kind: type[AllocatorResource], allocator: Allocating
) -> None:
    allocator.refuses = CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "1 GiB asked")

    with pytest.raises(CudaError, match="1 GiB asked"):
        kind(allocator).allocate(1 << 30, stream=FIRST)


def test_statistics_and_snapshot_come_from_the_allocator(
    kind: type[AllocatorResource], allocator: Allocating
) -> None:
    resource = kind(allocator)
    buffer = resource.allocate(100, stream=FIRST)

    assert resource.statistics() == {"allocation.all.current": 1}
    assert resource.snapshot() == {"segments": []}
    buffer.close(FIRST)


@pytest.mark.parametrize("arguments", [(), (1, 2), (1,)])
def test_wrong_arguments_are_refused(
    kind: type[AllocatorResource], allocator: Allocating, arguments: tuple[int, ...]
) -> None:
    with pytest.raises(TypeError):
        kind(allocator).allocate(*arguments)
    with pytest.raises(TypeError):
        kind(allocator).deallocate(1, *arguments)
    with pytest.raises(TypeError):
        kind(allocator).allocate(1, stream=FIRST, other=2)
    assert allocator.allocated == []


def test_arguments_may_be_named(kind: type[AllocatorResource], allocator: Allocating) -> None:
    resource = kind(allocator)
    buffer = resource.allocate(stream=FIRST, size=100)
    ptr = int(buffer.handle)
    resource.deallocate(stream=SECOND, size=100, ptr=ptr)

    assert allocator.freed == [(ptr, 0x2000)]
    buffer.close(FIRST)


def test_argument_without_a_stream_is_refused(
    kind: type[AllocatorResource], allocator: Allocating
) -> None:
    with pytest.raises(AttributeError):
        kind(allocator).allocate(100, stream=None)
    with pytest.raises(AttributeError):
        kind(allocator).deallocate(0, 100, stream=None)
    assert allocator.live == set()
