"""A driver that records launches, for calls of prepared kernels without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CPU, CUDA = 1, 2  # device types of DLPack
FUNCTION, CONTEXT, STREAM = 0x1000, 0x2000, 0x3000
ALLOCATED_ADDRESS = 0x40000
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
GET_CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
PUSH_CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
ALLOCATE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_void_p
)
FREE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)
IS_CAPTURING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))


class Driver:
    """Functions of a driver that records launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, int, int, list[int]]] = []
        # Calls that allocate or free memory: the size or the address, and the stream.
        self.memory_calls: list[tuple[str, int, int]] = []
        self.status = 0
        self.capturing = 0
        self.functions = (
            LAUNCH(self.launch),
            GET_CONTEXT(self.get_context),
            PUSH_CONTEXT(lambda context: 0),  # noqa: ARG005
            GET_CONTEXT(self.get_context),
            IS_CAPTURING(self.is_capturing),
            ALLOCATE(self.allocate),
            FREE(self.free),
        )
        self.parameter_count = 0

    def addresses(self) -> list[int]:
        return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self.functions]

    def get_context(self, context: Any) -> int:
        context[0] = CONTEXT
        return 0

    def is_capturing(self, stream: int, status: Any) -> int:  # noqa: ARG002
        status[0] = self.capturing
        return 0

    def allocate(self, address: Any, size_bytes: int, stream: int) -> int:
        address[0] = ALLOCATED_ADDRESS
        self.memory_calls.append(("allocate", size_bytes, stream))
        return self.status

    def free(self, address: int, stream: int) -> int:
        self.memory_calls.append(("free", address, stream))
        return self.status

    def launch(self, function: int, *rest: Any) -> int:
        grid, block, stream, parameters = rest[0], rest[3], rest[7], rest[8]
        words = [
            ctypes.c_uint64.from_address(parameters[index]).value
            for index in range(self.parameter_count)
        ]
        self.launches.append((function, grid, block, stream or 0, words))
        return self.status


@contextmanager
def recording_driver() -> Iterator[Driver]:
    """Make the extension call a driver that records launches, and accept arrays in host memory."""
    from cudakit.gpu import _fast_call

    driver = Driver()
    _fast_call.use_driver(*driver.addresses(), CPU)
    try:
        yield driver
    finally:
        _fast_call.use_driver(0, 0, 0, 0, 0, 0, 0, CUDA)
