"""Captures that end, whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from cudakit.errors import CudaError
from cudakit.gpu.api import Gpu, Graph, Stream


def captured(gpu: Gpu, stream: Stream, work: Callable[[Stream], None]) -> Graph:
    """Capture what ``work`` enqueues on a stream, which afterwards captures no more."""
    gpu.capture_begin(stream)
    try:
        work(stream)
    except BaseException:
        with suppress(CudaError):  # the failure that broke it off is the one to tell
            gpu.destroy_graph(gpu.capture_end(stream))
        raise
    return gpu.capture_end(stream)
