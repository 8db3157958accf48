"""DLPack capsules of cudakit, consumed by numpy in host memory."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from cudakit.gpu.api import Ptr
from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.device_array import capsule_of, view_of_capsule

CPU = (1, 0)


class Exporter:
    """An array in host memory that numpy reads through our capsule."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.view = ArrayView(
            Ptr(values.__array_interface__["data"][0]),
            values.dtype.name,
            values.shape,
            values.strides,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU

    def __dlpack__(self, **_: object) -> object:
        return capsule_of(self.view, CPU, self)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", "complex64"])
def test_capsule_shares_the_memory_of_a_strided_array(dtype: str) -> None:
    values = np.arange(24).reshape(4, 6).astype(dtype)[::2, 1::2]

    shared = np.from_dlpack(Exporter(values))

    assert shared.dtype == dtype
    np.testing.assert_array_equal(shared, values)
    assert np.shares_memory(shared, values)


def test_capsule_is_read_as_the_view_that_it_was_made_of() -> None:
    for view in (
        ArrayView(Ptr(64), "bfloat16", (2, 3), (6, 2)),
        ArrayView(Ptr(0), "float32", (0, 3), (12, 4)),
        ArrayView(Ptr(8), "complex128", (), ()),
    ):
        assert view_of_capsule(capsule_of(view, CPU, None))[0] == view


def test_owner_lives_as_long_as_the_consumer() -> None:
    exporter = Exporter(np.arange(3))
    owner = weakref.ref(exporter)
    shared = np.from_dlpack(exporter)
    del exporter
    gc.collect()
    assert owner() is not None

    del shared
    gc.collect()
    assert owner() is None


def test_owner_is_released_with_a_capsule_that_nobody_consumed() -> None:
    exporter = Exporter(np.arange(3))
    owner = weakref.ref(exporter)
    capsule = exporter.__dlpack__()
    del exporter
    gc.collect()
    assert owner() is not None

    del capsule
    gc.collect()
    assert owner() is None
