from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cudakit.arrays.graph import Layout, buffer_of, check_contents
from cudakit.errors import UsageError
from cudakit.gpu.dlpack import DLPACK_DEVICES

CUDA, HOST = 2, 1


class Tensor:
    """A host array that claims to be device memory in DLPack."""

    def __init__(self, array: npt.NDArray[Any], kind: int = CUDA) -> None:
        self.array, self.kind, self.streams = array, kind, list[object]()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, *, stream: object = None) -> object:
        self.streams.append(stream)
        return self.array.__dlpack__()


class Array:
    """A host array that claims to be device memory in the CUDA Array Interface."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        interface = array.__array_interface__
        names = ("shape", "typestr", "data", "strides")
        self.__cuda_array_interface__ = {name: interface[name] for name in names} | {"version": 3}


DTYPES = st.sampled_from(["int8", "uint16", "int64", "float16", "float64", "complex64", "bool"])


@st.composite
def views(draw: st.DrawFn) -> npt.NDArray[Any]:
    array = np.zeros(draw(arrays.array_shapes(min_dims=0, max_dims=3, max_side=4)), draw(DTYPES))
    steps = tuple(slice(None, None, draw(st.sampled_from([1, 2]))) for _ in array.shape)
    return np.asarray(array[steps]).T


@given(views())
def test_array_interface_and_dlpack_agree(array: npt.NDArray[Any]) -> None:
    dense = array.flags.c_contiguous
    expected = Layout(array.dtype.name, array.shape, array.nbytes, dense)
    for exporter in (Tensor(array), Array(array)):
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
    kept_arrays = [Array(np.zeros((2, 3), np.float32)) for _ in range(2)]
    first, second = (buffer_of(array, 0) for array in kept_arrays)
    check_contents(first, second, 0)
    for other in (np.zeros((3, 2), np.float32), np.zeros((2, 3)), np.zeros((3, 2), np.float32).T):
        with pytest.raises(UsageError, match="buffer 4 was captured as"):
            check_contents(buffer_of(Array(other), 4), first, 4)


def test_buffer_matches_itself_with_any_strides() -> None:
    strided = buffer_of(Array(np.zeros((4, 4))[:, ::2]), 0)
    check_contents(strided, strided, 0)
