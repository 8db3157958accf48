"""``cudakit.softmax`` on the simulated device, against numpy, and its errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cudakit
from cudakit.gpu.api import Ptr
from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.device_array import DeviceArray, array_over
from cudakit.gpu.sim import Sim

SIM = Sim()


def softmax_of_numpy(x: Any) -> Any:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def values(*shape: int, dtype: str = "float32") -> Any:
    return np.linspace(-3, 3, int(np.prod(shape))).reshape(shape).astype(dtype)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 5), (2, 1, 3, 4), (1, 9)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_softmax_equals_numpy(shape: tuple[int, ...], dtype: str) -> None:
    x = values(*shape, dtype=dtype)

    result = cudakit.softmax(cudakit.to_device(x, SIM))

    assert (result.shape, result.dtype) == (shape, dtype)
    tolerance = 1e-3 if dtype == "float16" else 1e-6
    expected = softmax_of_numpy(x.astype(np.float64))
    np.testing.assert_allclose(result.copy_to_host(), expected, rtol=tolerance, atol=tolerance)


def test_softmax_in_place_returns_the_array() -> None:
    x = cudakit.to_device(values(3, 5), SIM)

    assert cudakit.softmax(x, out=x) is x
    np.testing.assert_allclose(x.copy_to_host(), softmax_of_numpy(values(3, 5)), rtol=1e-6)


def test_softmax_of_no_elements_launches_nothing() -> None:
    assert cudakit.softmax(cudakit.to_device(values(0, 5), SIM)).shape == (0, 5)
    assert cudakit.softmax(cudakit.to_device(values(5, 0), SIM)).shape == (5, 0)


def array(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> DeviceArray:
    """Return an array over the memory of a matrix of 8 x 8."""
    memory = DeviceArray(SIM, "float32", (8, 8))
    result = array_over(SIM, ArrayView(Ptr(memory.ptr + offset), "float32", shape, strides))
    result.memory_owner = memory  # type: ignore[attr-defined] # keeps the memory
    return result


def test_integers_are_refused() -> None:
    with pytest.raises(cudakit.UsageError, match="floating-point"):
        cudakit.softmax(cudakit.to_device([1, 2], SIM))


def test_transposed_matrix_is_refused() -> None:
    with pytest.raises(cudakit.UsageError, match="the last one contiguous"):
        cudakit.softmax(array((4, 4), (4, 32)))


def test_strided_array_of_three_dimensions_is_refused() -> None:
    with pytest.raises(cudakit.UsageError, match="x has 3 dimensions and is not contiguous"):
        cudakit.softmax(array((2, 2, 4), (64, 32, 4)))


def test_array_without_dimensions_is_refused() -> None:
    with pytest.raises(cudakit.UsageError, match="one or two dimensions"):
        cudakit.softmax(cudakit.to_device(np.float32(1), SIM))


def test_number_is_refused() -> None:
    with pytest.raises(cudakit.UsageError, match="all arguments are numbers"):
        cudakit.softmax(1.0)
    with pytest.raises(cudakit.UsageError, match="x is a number"):
        cudakit.softmax(1.0, out=cudakit.to_device(values(3), SIM))


def test_output_of_another_shape_or_device_is_refused() -> None:
    x = cudakit.to_device(values(4), SIM)

    with pytest.raises(cudakit.UsageError, match="same dtype and shape"):
        cudakit.softmax(x, out=cudakit.to_device(values(3), SIM))
    with pytest.raises(cudakit.UsageError, match="sim:h200, out on sim:h200"):
        cudakit.softmax(x, out=cudakit.to_device(values(4), Sim()))


def test_output_that_overlaps_in_part_is_refused_and_unchanged() -> None:
    memory = cudakit.to_device(values(64), SIM)
    x, out = (
        array_over(SIM, ArrayView(Ptr(memory.ptr + offset), "float32", (32,), (4,)))
        for offset in (0, 64)
    )

    with pytest.raises(cudakit.UsageError, match="out overlaps x"):
        cudakit.softmax(x, out=out)

    np.testing.assert_array_equal(memory.copy_to_host(), values(64))


def test_array_in_host_memory_is_refused() -> None:
    with pytest.raises(cudakit.UsageError, match="x is not a device array"):
        cudakit.softmax(values(3))
