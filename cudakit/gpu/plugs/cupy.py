"""An allocator in CuPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cudakit.errors import MissingDependency
from cudakit.gpu.api.allocator import Allocator
from cudakit.gpu.plugs.devices import Devices


def allocator_function(allocators: Iterable[Allocator]) -> Callable[[int], Any]:
    """Return what cupy.cuda.set_allocator takes. Raises MissingDependency without CuPy."""
    try:
        import cupy  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency(
            "cupy", purpose="an allocator for CuPy", requirement="cupy-cuda13x"
        ) from error
    return function_of(cupy, allocators)


def function_of(cupy: Any, allocators: Iterable[Allocator]) -> Callable[[int], Any]:
    """Return a function of a size that gives a MemoryPointer, of the current device and stream.

    What CuPy drops goes back to the stream that it was allocated on, as in CuPy's own pool: who uses it on
    another stream makes that one wait, or calls ``record_use``.
    """
    devices = Devices(allocators)
    current_stream = cupy.cuda.get_current_stream

    def malloc(size_bytes: int, device: int) -> int:
        return devices[device].alloc(size_bytes, current_stream().ptr)

    def free(ptr: int, device: int) -> None:
        devices[device].free(ptr)

    # The thinnest way in: its memory is made, and given back, in C++.
    function: Callable[[int], Any] = cupy.cuda.PythonFunctionAllocator(malloc, free).malloc
    return function
