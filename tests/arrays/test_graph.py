""""""

from __future__ import annotations

import ctypes
import doctest
import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import contract.host_kernels  # noqa: F401 gives the simulated device its kernels
import numpy as np
import numpy.typing as npt
import pytest
from contract.kernels import SOURCE
from contract.workbench import Workbench
from cuda.bindings import driver as cu
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numba_ready import WHY_NOT, numba_is_ready

import cudakit
from cudakit.arrays.graph import (
    Graphed,
    Layout,
    buffer_of,
    capture_failure,
    check_contents,
    status_of,
)
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import LEGACY, Ptr, Stream
from cudakit.gpu.cuda.driver import check
from cudakit.gpu.device_array import DLPACK_DEVICES
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.sim import Sim


def test_the_example_of_the_call_runs() -> None:
    module = importlib.import_module("cudakit.arrays.graph")
    results = doctest.testmod(module, extraglobs={"cudakit": cudakit})

    assert results.attempted >= 5
    assert results.failed == 0


def test_no_framework_is_imported_for_it() -> None:
    sim = Sim()
    buffer = sim.malloc(16)
    before = set(sys.modules)
    with cudakit.graph(
        lambda buffer, stream: sim.fill(buffer, 1, 16, stream), buffer, device=sim
    ) as graphed:
        graphed.replay()

    assert not {"torch", "cupy", "numba"} & (set(sys.modules) - before)


@pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists(),
    reason="needs a machine without a CUDA device",
)
@pytest.mark.parametrize("device", [None, 0])
def test_without_a_driver_the_call_says_what_to_install(device: int | None) -> None:
    with pytest.raises(cudakit.EnvironmentUnusable, match="libcuda") as caught:
        cudakit.graph(lambda buffer: None, 4096, device=device)  # noqa: ARG005
    assert "driver" in caught.value.hint


def test_non_device_is_refused() -> None:
    with pytest.raises(cudakit.UsageError, match="not a device: 'gpu'"):
        cudakit.graph(lambda buffer: None, 4096, device="gpu")  # type: ignore[arg-type]  # noqa: ARG005


CUDA, HOST = 2, 1


class Tensor:
    """A host array that claims to be device memory in DLPack."""

    def __init__(self, array: npt.NDFakeArray[Any], kind: int = CUDA) -> None:
        self.array, self.kind, self.streams = array, kind, list[object]()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, *, stream: object = None) -> object:
        self.streams.append(stream)
        return self.array.__dlpack__()


class FakeArray:
    """A host array that claims to be device memory in the CUDA FakeArray Interface."""

    def __init__(self, array: npt.NDFakeArray[Any]) -> None:
        self.array = array
        interface = array.__array_interface__
        names = ("shape", "typestr", "data", "strides")
        self.__cuda_array_interface__ = {name: interface[name] for name in names} | {"version": 3}


DTYPES = st.sampled_from(["int8", "uint16", "int64", "float16", "float64", "complex64", "bool"])


@st.composite
def views(draw: st.DrawFn) -> npt.NDFakeArray[Any]:
    array = np.zeros(draw(arrays.array_shapes(min_dims=0, max_dims=3, max_side=4)), draw(DTYPES))
    steps = tuple(slice(None, None, draw(st.sampled_from([1, 2]))) for _ in array.shape)
    return np.asarray(array[steps]).T


@given(views())
def test_array_interface_and_dlpack_agree(array: npt.NDFakeArray[Any]) -> None:
    dense = array.flags.c_contiguous
    expected = Layout(array.dtype.name, array.shape, array.nbytes, dense)
    for exporter in (Tensor(array), FakeArray(array)):
        buffer = buffer_of(exporter, 0)
        assert buffer.ptr == array.ctypes.data
        assert buffer.layout == expected


def test_reading_buffer_has_no_side_effects() -> None:
    tensor = Tensor(np.arange(5))
    buffer_of(tensor, 0)

    assert tensor.streams == [-1]
    assert tensor.array.tolist() == [0, 1, 2, 3, 4]


def test_managed_memory_is_device_memory_and_host_memory_is_not() -> None:
    (managed,) = DLPACK_DEVICES - {CUDA}
    assert buffer_of(Tensor(np.zeros(2), managed), 0).layout is not None
    with pytest.raises(UsageError, match="in host memory"):
        buffer_of(Tensor(np.zeros(2), HOST), 0)


def test_address_may_be_any_integer_type() -> None:
    class Address(int):
        pass

    assert buffer_of(Address(4096), 0).ptr == 4096
    with pytest.raises(UsageError, match="c_void_p"):
        buffer_of(ctypes.c_void_p(4096), 0)


def test_contents_match_with_same_dtype_and_shape() -> None:
    kept_arrays = [FakeArray(np.zeros((2, 3), np.float32)) for _ in range(2)]
    first, second = (buffer_of(array, 0) for array in kept_arrays)
    check_contents(first, second, 0)
    for other in (np.zeros((3, 2), np.float32), np.zeros((2, 3)), np.zeros((3, 2), np.float32).T):
        with pytest.raises(UsageError, match="buffer 4 was captured as"):
            check_contents(buffer_of(FakeArray(other), 4), first, 4)


def test_buffer_matches_itself_with_any_strides() -> None:
    strided = buffer_of(FakeArray(np.zeros((4, 4))[:, ::2]), 0)
    check_contents(strided, strided, 0)


SPOILED = cuda_error(Status.STREAM_CAPTURE_INVALIDATED)


class OfNumba(Exception):
    code = 900


class OfCuPy(RuntimeError):
    status = 906


@pytest.mark.parametrize(
    ("raised_error", "status"),
    [
        (cuda_error(Status.STREAM_CAPTURE_ISOLATION), Status.STREAM_CAPTURE_ISOLATION),
        (OfNumba("[900] Call to cuMemAlloc"), Status.STREAM_CAPTURE_UNSUPPORTED),
        (OfCuPy("cudaErrorStreamCaptureImplicit"), Status.STREAM_CAPTURE_IMPLICIT),
        (
            RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile"),
            Status.STREAM_CAPTURE_UNSUPPORTED,
        ),
        (RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED"), Status.STREAM_CAPTURE_INVALIDATED),
        (
            RuntimeError(
                "the current stream is capturing, so synchronous API calls are disallowed"
            ),
            Status.STREAM_CAPTURE_UNSUPPORTED,
        ),
        (SPOILED, Status.STREAM_CAPTURE_INVALIDATED),
    ],
)
def test_capture_error_of_any_library_becomes_cuda_error(
    raised_error: Exception, status: Status
) -> None:
    found = capture_failure(raised_error, SPOILED)

    assert (found.code, found.name) == (status, f"CUDA_ERROR_{status.name}")
    assert str(raised_error).partition("\n")[0] in found.message
    assert "\n" not in found.message
    assert found.hint


def test_other_errors_are_not_capture_errors() -> None:
    class Exit(Exception):
        code = 3

    for error in (ValueError("the stream is dry"), Exit(), cuda_error(Status.OUT_OF_MEMORY)):
        assert status_of(error) is None
    assert status_of(OfNumba()) is Status.STREAM_CAPTURE_UNSUPPORTED


# --- ``cudakit.graph`` on a real device, with torch, CuPy, Numba, cuda.core and the driver API -----

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


# --- ``cudakit.graph`` on the simulated device, without frameworks ---------------------------------


@pytest.fixture
def bench() -> Iterator[Workbench]:
    with closing(Sim()) as gpu:
        yield Workbench(gpu, gpu.compile(SOURCE))


class Array:
    """Integers of the simulated device with the CUDA Array Interface."""

    def __init__(self, bench: Workbench, *values: int) -> None:
        self.ptr = bench.ints(*values)
        self.__cuda_array_interface__ = {
            "shape": (len(values),),
            "typestr": "<i4",
            "data": (int(self.ptr), False),
            "version": 3,
        }


def adding(bench: Workbench, value: Ptr, amount: int, **options: int) -> Graphed[str]:
    def add(address: Ptr, stream: Stream) -> str:
        bench.add(address, 1, amount, stream)
        return "added"

    return cudakit.graph(add, value, device=bench.gpu, **options)


def test_replay_repeats_enqueued_work(bench: Workbench) -> None:
    value = bench.ints(0)
    with adding(bench, value, 1, warmup=0) as graphed:
        assert bench.read(value) == [0]
        assert graphed.replay() == "added"
        graphed.replay()

    assert bench.read(value) == [2]


def test_function_runs_warmup_times(bench: Workbench) -> None:
    value = bench.ints(0)
    with adding(bench, value, 1):
        assert bench.read(value) == [3]
    with adding(bench, value, 10, warmup=1):
        assert bench.read(value) == [13]


def test_function_runs_after_earlier_work(bench: Workbench) -> None:
    value, observed, second_array = bench.ints(0), bench.ints(0), bench.gpu.stream(blocking=False)
    bench.spin(second_array)
    bench.store(value, 7, second_array)
    with cudakit.graph(
        lambda stream: bench.move(observed, value, stream), device=bench.gpu, warmup=1
    ):
        assert bench.read(observed) == [7]


def test_call_copies_new_contents_and_replays(bench: Workbench) -> None:
    source, result = Array(bench, 0, 0), Array(bench, 0, 0)

    def work(source: Array, result: Array, stream: Stream) -> Array:
        bench.gpu.copy(result.ptr, source.ptr, 8, stream)
        bench.add(result.ptr, 2, 100, stream)
        return result

    with cudakit.graph(work, source, result, device=bench.gpu) as graphed:
        for values in ((1, 2), (3, 4)):
            assert graphed(Array(bench, *values), result) is result
            assert bench.read(result.ptr, 2) == [value + 100 for value in values]
            assert bench.read(source.ptr, 2) == [*values]


def test_contents_and_replay_are_stream_ordered(bench: Workbench) -> None:
    source, new_array, observed = Array(bench, 0), Array(bench, 0), bench.ints(0)
    stream = bench.gpu.stream(blocking=False)

    def work(source: Array, stream: Stream) -> None:
        bench.move(observed, source.ptr, stream)

    with cudakit.graph(work, source, device=bench.gpu) as graphed:
        bench.spin(stream)
        bench.store(new_array.ptr, 5, stream)
        graphed(new_array, stream=stream)
        bench.store(source.ptr, 6, stream)
        assert bench.read(observed) == [5]
        graphed.replay(stream)
        assert bench.read(observed) == [6]


def test_plain_address_accepts_no_contents(bench: Workbench) -> None:
    value, second_array = bench.ints(4), bench.ints(5)
    with adding(bench, value, 1, warmup=0) as graphed:
        graphed(value)
        assert bench.read(value) == [5]
        with pytest.raises(UsageError, match="buffer 0 was captured as a plain address"):
            graphed(second_array)
        assert bench.read(value) == [5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (3,)}, r"captured as int32 \[2\], got int32 \[3\]"),
        ({"shape": (1, 2)}, r"got int32 \[1, 2\]"),
        ({"typestr": "<f4"}, r"got float32 \[2\]"),
        ({"strides": (8,)}, r"got int32 \[2\], strided"),
    ],
)
def test_mismatched_contents_are_rejected_before_copies(
    bench: Workbench, change: dict[str, object], message: str
) -> None:
    first, second = Array(bench, 1, 1), Array(bench, 2, 2)
    new_array, wrong_array = Array(bench, 3, 3), Array(bench, 4, 4)
    wrong_array.__cuda_array_interface__.update(change)

    def work(first_array: Array, second_array: Array, stream: Stream) -> None:
        bench.gpu.copy(second_array.ptr, first_array.ptr, 8, stream)

    with cudakit.graph(work, first, second, device=bench.gpu, warmup=0) as graphed:
        with pytest.raises(UsageError, match=f"buffer 1 was.*{message}"):
            graphed(new_array, wrong_array)
        with pytest.raises(UsageError, match="2 buffers were captured, 1 given"):
            graphed(new_array)
    assert bench.read(first.ptr, 2) == [1, 1]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("words", "buffer 1 is not a device buffer: str"),
        (1.5, "float"),
        (True, "bool"),
        (None, "NoneType"),
        (np.zeros(3), r"numpy\.ndarray in host memory"),
    ],
)
def test_non_buffer_is_refused(bench: Workbench, argument: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        cudakit.graph(lambda *_: None, bench.ints(0), argument, device=bench.gpu)
    assert "functools.partial" in caught.value.hint


def test_update_changes_replay(bench: Workbench) -> None:
    value, amount = bench.ints(0), 1

    def add(address: Ptr, stream: Stream) -> int:
        bench.add(address, 1, amount, stream)
        return amount

    with cudakit.graph(add, value, device=bench.gpu, warmup=0) as graphed:
        amount = 10
        assert (graphed.replay(), graphed.update(), graphed.replay()) == (1, 10, 10)
        assert bench.read(value) == [11]
        graphed.update(lambda address, stream: bench.store(address, 7, stream))
        graphed.replay()
        assert bench.read(value) == [7]
        graphed.update(warmup=2)
        assert bench.read(value) == [7]


def test_failed_update_keeps_old_graph(bench: Workbench) -> None:
    value = bench.ints(0)

    def twice(address: Ptr, stream: Stream) -> None:
        bench.add(address, 1, 1, stream)
        bench.add(address, 1, 1, stream)

    with adding(bench, value, 1, warmup=0) as graphed:
        with pytest.raises(CudaError, match=r"GRAPH_EXEC_UPDATE_FAILURE.*TOPOLOGY_CHANGED"):
            graphed.update(twice)
        assert graphed.replay() == "added"
        assert bench.read(value) == [1]
        graphed.update()


REFUSED = {
    "sync": (
        "STREAM_CAPTURE_UNSUPPORTED",
        lambda gpu, stream: gpu.sync_stream(stream),
        "synchronization",
    ),
    "malloc": ("STREAM_CAPTURE_UNSUPPORTED", lambda gpu, _: gpu.malloc(512), "allocations"),
    "legacy": (
        "STREAM_CAPTURE_IMPLICIT",
        lambda gpu, _: gpu.record(gpu.event(), LEGACY),
        "parameter named `stream`",
    ),
}


@pytest.mark.parametrize(("name", "call_name", "hint"), REFUSED.values(), ids=REFUSED)
def test_uncapturable_work_is_named_and_leaves_nothing_behind(
    bench: Workbench, name: str, call_name: object, hint: str
) -> None:
    gpu, value = bench.gpu, bench.ints(0)

    def work(address: Ptr, stream: Stream) -> None:
        bench.add(address, 1, 1, stream)
        call_name(gpu, stream)  # type: ignore[operator]

    with pytest.raises(CudaError, match=f"CUDA_ERROR_{name}: the function cannot be captured") as e:
        cudakit.graph(work, value, device=gpu, warmup=0)
    assert hint in e.value.hint
    assert "\n" not in e.value.message
    with adding(bench, value, 1, warmup=0) as graphed:
        graphed.replay()
    assert bench.read(value) == [1]


def test_caught_capture_error_is_raised_at_end(bench: Workbench) -> None:
    def work(stream: Stream) -> None:
        with pytest.raises(CudaError):
            bench.gpu.sync_stream(stream)

    with pytest.raises(CudaError, match=r"STREAM_CAPTURE_INVALIDATED.*cannot be captured"):
        cudakit.graph(work, device=bench.gpu, warmup=0)


def test_unjoined_stream_is_reported_with_hint(bench: Workbench) -> None:
    gpu, value, second_array = bench.gpu, bench.ints(0), bench.gpu.stream()

    def work(stream: Stream) -> None:
        gpu.wait(second_array, bench.recorded(stream))
        bench.store(value, 1, second_array)

    with pytest.raises(CudaError, match="STREAM_CAPTURE_UNJOINED") as caught:
        cudakit.graph(work, device=gpu, warmup=0)
    assert "wait for all forked streams" in caught.value.hint


def test_exception_of_function_is_raised_unchanged(bench: Workbench) -> None:
    value = bench.ints(0)

    def work(address: Ptr, stream: Stream) -> None:
        bench.add(address, 1, 1, stream)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cudakit.graph(work, value, device=bench.gpu, warmup=0)
    bench.gpu.sync()
    assert bench.read(value) == [0]


@pytest.mark.parametrize("warmup", [0, 1])
def test_function_that_enqueues_nothing_is_rejected(bench: Workbench, warmup: int) -> None:
    with pytest.raises(UsageError, match="enqueued nothing") as caught:
        cudakit.graph(lambda: None, device=bench.gpu, warmup=warmup)
    assert "stream" in caught.value.hint


def test_garbage_collection_is_off_during_capture(bench: Workbench) -> None:
    value, observed = bench.ints(0), list[bool]()

    def work(address: Ptr, stream: Stream) -> None:
        observed.append(gc.isenabled())
        bench.add(address, 1, 1, stream)

    assert gc.isenabled()
    with cudakit.graph(work, value, device=bench.gpu, warmup=1):
        assert observed == [True, False]
        assert gc.isenabled()


def test_closed_graph_raises_and_device_stays_open(bench: Workbench) -> None:
    graphed = adding(bench, bench.ints(0), 1)
    graphed.close()
    graphed.close()

    for method in (graphed.replay, graphed.update, lambda: graphed(1)):
        with pytest.raises(UsageError, match="was closed"):
            method()
    bench.gpu.sync()


def test_invalid_stream_and_device_are_rejected(bench: Workbench) -> None:
    with (
        adding(bench, bench.ints(0), 1) as graphed,
        pytest.raises(UsageError, match="not a stream of the simulated device"),
    ):
        graphed.replay(SimpleNamespace(ptr=1))
    with pytest.raises(UsageError, match="warmup is -1"):
        adding(bench, bench.ints(0), 1, warmup=-1)
