"""Views of arrays in device memory; tests/gpu/graphed/test_buffers.py compares all protocols."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cudakit.errors import UsageError
from cudakit.gpu.arrays import contiguous_strides, require_view, view_of


def exporter(**fields: Any) -> SimpleNamespace:
    interface = {"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "version": 3} | fields
    return SimpleNamespace(__cuda_array_interface__=interface)


def test_array_without_strides_is_contiguous() -> None:
    view = require_view(exporter(), "out")

    assert (view.ptr, view.dtype, view.item_bytes, view.shape) == (4096, "float32", 4, (2, 3))
    assert view.strides_bytes == contiguous_strides((2, 3), 4) == (12, 4)
    assert view.is_contiguous
    assert view.size_bytes == 24
    assert not view.is_read_only
    assert view.producer_stream is None


def test_read_only_flag_and_producer_stream_are_read() -> None:
    view = require_view(exporter(data=(4096, True), stream=7), "out")

    assert view.is_read_only
    assert view.producer_stream == 7


def test_strided_array_is_not_contiguous_and_empty_array_is() -> None:
    assert not require_view(exporter(strides=(24, 8)), "out").is_contiguous
    assert require_view(exporter(shape=(0, 3), strides=(24, 8), data=(None, False)), "a").ptr == 0
    assert require_view(exporter(shape=(0, 3), strides=(24, 8)), "a").is_contiguous


def test_array_in_host_memory_has_no_view() -> None:
    assert view_of(np.zeros(3)) is None
    assert view_of(3) is None
    with pytest.raises(
        UsageError, match=r"out is not an array in device memory: numpy.ndarray in host"
    ):
        require_view(np.zeros(3), "out")
