"""``cudakit.count_nonfinite`` and ``cudakit.LossScaler``, on simulated devices and on a GPU."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import cudakit
from cudakit.arrays.nonfinite import NonFinite, NonFiniteKernels
from cudakit.errors import UsageError
from cudakit.gpu.api import LEGACY, Gpu, Ptr
from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.open import open_gpu
from cudakit.gpu.sim import Sim

FLOATS = ("float16", "float32", "float64")
SIM = Sim()


def count_with_numpy(values: npt.NDArray[Any]) -> NonFinite:
    parts = values.view(values.real.dtype) if values.dtype.kind == "c" else values
    return NonFinite(int(np.isnan(parts).sum()), int(np.isinf(parts).sum()))


@given(
    st.sampled_from(FLOATS).flatmap(
        lambda dtype: arrays.arrays(
            dtype,
            st.integers(0, 40),
            elements=st.sampled_from([0.0, -1.5, float("nan"), float("inf"), float("-inf")]),
        )
    )
)
def test_counts_are_those_of_numpy(values: npt.NDArray[Any]) -> None:
    array = cudakit.to_device(values, SIM)

    assert cudakit.count_nonfinite(array, separately=True) == count_with_numpy(values)
    assert cudakit.count_nonfinite(array) == sum(count_with_numpy(values))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_parts_of_complex_elements_are_counted(dtype: str) -> None:
    values = np.array([1 + 1j, complex("nan+infj"), complex("inf")], dtype)

    counts = cudakit.count_nonfinite(cudakit.to_device(values, SIM), separately=True)

    assert counts == count_with_numpy(values) == NonFinite(1, 2)


def test_arrays_are_counted_together_and_integers_have_none() -> None:
    values = (np.array([np.nan, 1.0]), np.arange(5), np.array([[np.inf]], np.float16))

    assert cudakit.count_nonfinite(*(cudakit.to_device(array, SIM) for array in values)) == 2


def test_counts_are_written_to_output_array_without_waiting() -> None:
    sim = Sim()
    array = cudakit.to_device(np.array([np.nan, np.inf, np.inf]), sim)
    out = cudakit.to_device(np.full(2, 99, np.int64), sim)
    stream = sim.stream(blocking=False)

    assert cudakit.count_nonfinite(array, out=out, stream=stream) is out
    assert out.stream == stream
    assert out.copy_to_host().tolist() == [1, 2]


def test_graph_counts_at_each_launch() -> None:
    sim = Sim()
    stream = sim.stream()
    array = cudakit.to_device(np.array([np.nan, 1.0]), sim, stream)
    out = cudakit.to_device(np.zeros(2, np.int64), sim, stream)
    sim.capture_begin(stream)
    cudakit.count_nonfinite(array, out=out, stream=stream)
    executable = sim.instantiate(sim.capture_end(stream))

    for _ in range(2):
        sim.graph_launch(executable, stream)
    assert out.copy_to_host().tolist() == [1, 0]


def test_waiting_for_a_captured_stream_is_rejected() -> None:
    sim = Sim()
    stream = sim.stream()
    array = cudakit.to_device(np.zeros(3), sim, stream)
    sim.capture_begin(stream)
    with pytest.raises(UsageError, match="captured") as caught:
        cudakit.count_nonfinite(array, stream=stream)
    sim.capture_end(stream)

    assert "out=" in caught.value.hint


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    array = cudakit.to_device(np.full(24, np.nan, np.float32), SIM)
    array.view = ArrayView(Ptr(array.ptr), "float32", shape, strides)
    return array


def test_transposed_array_is_counted_and_array_with_gaps_is_rejected() -> None:
    assert cudakit.count_nonfinite(strided((4, 6), (4, 16))) == 24
    for array in (strided((4, 3), (24, 8)), strided((4, 4), (0, 4))):
        with pytest.raises(UsageError, match="gaps or repeated"):
            cudakit.count_nonfinite(array)


def test_invalid_arrays_are_rejected() -> None:
    array = cudakit.to_device(np.zeros(3), SIM)
    with pytest.raises(UsageError, match="no array"):
        cudakit.count_nonfinite()
    with pytest.raises(UsageError, match="several devices"):
        cudakit.count_nonfinite(array, cudakit.to_device(np.zeros(3), Sim()))
    with pytest.raises(UsageError, match="array 0"):
        cudakit.count_nonfinite(np.zeros(3))
    with pytest.raises(UsageError, match="two int64"):
        cudakit.count_nonfinite(array, out=cudakit.to_device(np.zeros(2), SIM))


# --- kernels


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    with closing(open_gpu(request.param)) as gpu:
        yield gpu


@pytest.mark.parametrize("dtype", [*FLOATS, "bfloat16"])
@pytest.mark.parametrize(("count", "skipped"), [(1, 0), (3, 1), (4096, 0), (1_000_003, 3)])
def test_kernel_counts_at_every_alignment(gpu: Gpu, dtype: str, count: int, skipped: int) -> None:
    values = np.zeros(count + skipped + 8, "float32" if dtype == "bfloat16" else dtype)
    values[[skipped, skipped + count // 2, skipped + count - 1]] = [np.nan, np.inf, -np.inf]
    values[:skipped] = values[skipped + count :] = np.nan
    expected = count_with_numpy(values[skipped : skipped + count])
    stored = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values
    array = cudakit.to_device(stored, gpu)
    counters = cudakit.to_device(np.zeros(2, np.uint64), gpu)

    with closing(NonFiniteKernels(gpu)) as kernels:
        address = Ptr(array.ptr + skipped * stored.itemsize)
        kernels.count(Ptr(counters.ptr), address, count, dtype, LEGACY)
        assert counters.copy_to_host().tolist() == list(expected)


@pytest.mark.gpu
def test_gradients_of_torch_are_counted() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        gradient = torch.zeros((64, 32, 3, 3), device="cuda", dtype=dtype)
        gradient = gradient.to(memory_format=torch.channels_last)
        gradient[3, 1, 2, 0], gradient[5, 5] = float("nan"), float("-inf")
        other = torch.full((100,), float("nan"), device="cuda", dtype=dtype)
        counts = cudakit.count_nonfinite(gradient, other, separately=True)
        assert counts == NonFinite(101, 9)


@pytest.mark.gpu
def test_captured_count_of_torch_is_replayed() -> None:
    torch = pytest.importorskip("torch")
    gradient = torch.zeros(1000, device="cuda")
    counts = torch.zeros(2, dtype=torch.int64, device="cuda")
    cudakit.count_nonfinite(gradient, out=counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cudakit.count_nonfinite(gradient, out=counts)
    gradient[7] = float("inf")
    graph.replay()

    assert counts.tolist() == [0, 1]


# --- loss scaler


def test_scale_shrinks_after_nonfinite_gradients_and_grows_after_an_interval() -> None:
    scaler = cudakit.LossScaler(8.0, growth_interval=3)

    applied = [scaler.update(count) for count in (0, 0, 5, 0, 0, 0, 0)]

    assert applied == [True, True, False, True, True, True, True]
    assert (scaler.scale, scaler.finite_steps) == (8.0, 1)


@pytest.mark.parametrize(
    "options", [{"scale": 0}, {"growth_factor": 0.5}, {"backoff_factor": 1}, {"growth_interval": 0}]
)
def test_invalid_loss_scaler_is_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="loss scaler"):
        cudakit.LossScaler(**options)


def test_examples_of_nonfinite_run() -> None:
    module = __import__("cudakit.arrays.nonfinite", fromlist=["LossScaler"])
    results = doctest.testmod(module, extraglobs={"cudakit": cudakit})

    assert results.attempted >= 7
    assert results.failed == 0
