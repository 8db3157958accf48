"""``cudakit.graph`` on a real device, with torch, CuPy, Numba, cuda.core and the driver API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu
from numba_ready import WHY_NOT, numba_is_ready

import cudakit
from cudakit.gpu.cuda.driver import check

pytestmark = pytest.mark.gpu

WORDS = 1024


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@contextmanager
def words() -> Iterator[int]:
    """Allocate device memory in the primary context."""
    with cudakit.device(0):
        address = int(check(cu.cuMemAlloc(4 * WORDS)))
        check(cu.cuMemsetD32(address, 0, WORDS))
        yield address
        check(cu.cuMemFree(address))


def content(address: int) -> set[int]:
    cudakit.synchronize()
    host_array = np.empty(WORDS, np.uint32)
    check(cu.cuMemcpyDtoH(host_array.ctypes.data, address, host_array.nbytes))
    return set(host_array.tolist())


def test_driver_api_function_is_replayed_and_updated() -> None:
    value = 1

    def fill(address: int, stream: int) -> None:
        check(cu.cuMemsetD32Async(address, value, WORDS, stream))

    with words() as address, cudakit.graph(fill, address) as graphed:
        check(cu.cuMemsetD32(address, 9, WORDS))
        graphed.replay()
        assert content(address) == {1}
        value = 2
        graphed.update()
        graphed.replay()
        assert content(address) == {2}


def test_work_in_legacy_stream_is_refused() -> None:
    def fill(address: int) -> None:
        check(cu.cuMemsetD32Async(address, 1, WORDS, 1))

    with (
        words() as address,
        pytest.raises(cudakit.CudaError, match="STREAM_CAPTURE_IMPLICIT") as caught,
    ):
        cudakit.graph(fill, address, warmup=0)
    assert "parameter named `stream`" in caught.value.hint


def test_cuda_core_buffer_is_read_through_dlpack() -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    buffer, new = (device.allocate(4 * WORDS, stream=stream) for _ in range(2))
    new.fill(3, stream=stream)
    stream.sync()

    with words() as result:

        def move(source: Any, stream: int) -> None:
            check(cu.cuMemcpyDtoDAsync(result, int(source.handle), 4 * WORDS, stream))

        with cudakit.graph(move, buffer) as graphed:
            graphed(new)
            assert content(result) == {0x03030303}
    for device_buffer in (buffer, new):
        device_buffer.close(stream)
    stream.sync()


def test_torch_tensors_take_new_contents_and_results_stay_in_place(torch: Any) -> None:
    array = torch.zeros(1000, device="cuda")
    with cudakit.graph(lambda array: (array * 2 + 1).sum(), array) as graphed:
        for value in (1.0, 5.0):
            result = graphed(torch.full_like(array, value))
            assert result.item() == 1000 * (2 * value + 1)
        assert result is graphed.replay()


def test_torch_memory_of_capture_is_not_reused(torch: Any) -> None:
    array = torch.ones(1 << 20, device="cuda")
    with cudakit.graph(lambda array: ((array + 1) * (array + 2)).sum(), array) as graphed:
        other_arrays = [torch.full((1 << 20,), float(i), device="cuda") for i in range(64)]
        assert graphed.replay().item() == 6 * (1 << 20)
        assert [float(other.mean()) for other in other_arrays] == list(range(64))


def test_torch_replays_draw_new_random_numbers(torch: Any) -> None:
    array = torch.zeros(100, device="cuda")
    with cudakit.graph(torch.rand_like, array) as graphed:
        samples = [graphed.replay().clone() for _ in range(3)]

    assert not torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[1], samples[2])


def test_torch_bfloat16_tensor_is_buffer(torch: Any) -> None:
    array = torch.zeros(8, dtype=torch.bfloat16, device="cuda")
    parameter = torch.ones(8, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with (
        torch.no_grad(),
        cudakit.graph(lambda array, parameter: array + parameter, array, parameter) as graphed,
    ):
        assert graphed(torch.full_like(array, 2), parameter).tolist() == [3.0] * 8
        with pytest.raises(cudakit.UsageError, match="captured as bfloat16"):
            graphed(array.float(), parameter)


def test_replay_uses_current_or_given_stream(torch: Any) -> None:
    array = torch.zeros(1, device="cuda")
    stream = torch.cuda.Stream()
    with cudakit.graph(lambda array: array.add_(1), array, warmup=1) as graphed:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            array.fill_(10)
            graphed.replay()
        graphed.replay(stream)
        stream.synchronize()
        assert array.item() == 12


def test_update_with_torch_replaces_graph(torch: Any) -> None:
    array = torch.ones(4, device="cuda")
    with cudakit.graph(lambda array: array * 2, array) as graphed:
        assert graphed.replay().tolist() == [2.0] * 4
        graphed.update(lambda array: (array * 3).sum(), warmup=1)
        assert graphed.replay().item() == 12


def test_synchronization_in_torch_function_is_reported(torch: Any) -> None:
    array = torch.ones(4, device="cuda")

    def work(array: Any) -> None:
        array.add_(1)
        torch.cuda.current_stream().synchronize()

    with pytest.raises(cudakit.CudaError, match="STREAM_CAPTURE") as caught:
        cudakit.graph(work, array)
    assert "\n" not in caught.value.message
    array.fill_(1)
    with cudakit.graph(lambda array: array * 2, array) as graphed:
        assert graphed.replay().tolist() == [2.0] * 4


def test_torch_pool_can_be_deleted_after_failed_capture(torch: Any) -> None:
    array = torch.ones(4, device="cuda")
    with pytest.raises(cudakit.CudaError, match="STREAM_CAPTURE"):
        cudakit.graph(lambda array: float((array * 2).sum()), array)

    # torch aborts the process here if a capture is still said to be underway.
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.ones(1 << 20, device="cuda")
    del tensor, pool
    torch.cuda.empty_cache()


def test_cupy_function_allocates_from_private_pool(cupy: Any) -> None:
    array = cupy.zeros(1000, cupy.float32)
    with cudakit.graph(lambda array: (array * 2 + 1).sum(), array) as graphed:
        other_arrays = [cupy.full(1000, i, cupy.float32) for i in range(64)]
        for value in (1, 5):
            assert float(graphed(cupy.full_like(array, value))) == 1000 * (2 * value + 1)
        assert [int(other.mean()) for other in other_arrays] == list(range(64))


def test_update_changes_parameters_of_cupy_function(cupy: Any) -> None:
    array, factor = cupy.ones(16, cupy.float32), 2.0
    scale = cupy.ElementwiseKernel("float32 f", "float32 x", "x = f", "cudakit_test_scale")

    def work(array: Any) -> None:
        scale(factor, array)

    with cudakit.graph(work, array) as graphed:
        factor = 7.0
        graphed.update()
        array[:] = 0
        graphed.replay()
        assert array.tolist() == [7.0] * 16


def test_synchronization_in_cupy_function_is_reported(cupy: Any) -> None:
    array = cupy.ones(16, cupy.float32)
    with pytest.raises(cudakit.CudaError, match="STREAM_CAPTURE"):
        cudakit.graph(lambda array: float((array * 2).sum()), array)


@pytest.mark.filterwarnings("ignore:.*Grid size")
def test_numba_function_receives_stream() -> None:
    cuda = pytest.importorskip("numba.cuda")
    if not numba_is_ready():
        pytest.skip(WHY_NOT)

    @cuda.jit
    def add(array: Any) -> None:
        array[cuda.grid(1)] += 1

    def work(array: Any, stream: int) -> None:
        add[1, 32, cuda.external_stream(stream)](array)

    array = cuda.to_device(np.zeros(32, np.float32))
    with cudakit.graph(work, array, warmup=1) as graphed:
        graphed.replay()
        graphed.replay()
        cudakit.synchronize()
        assert array.copy_to_host().tolist() == [3.0] * 32
