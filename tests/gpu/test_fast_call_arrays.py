"""Calls of prepared kernels with arrays that are read through attributes, and with a counter."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import numpy as np
import pytest
from gpu.launch_recorder import (
    ALLOCATED_ADDRESS,
    CONTEXT,
    FUNCTION,
    STREAM,
    Driver,
    recording_driver,
)

from cudakit.gpu.api import LEGACY, Ptr, Stream
from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.device_array import DeviceArray
from cudakit.gpu.sim import Sim

fast_call = pytest.importorskip("cudakit.gpu._fast_call")

FLOAT32 = 2 + 256 * 32  # code of DLPack and number of bits
CODES = {np.dtype("float32"): FLOAT32, "float32": FLOAT32}
CUPY_STREAM = 0x7000
CURRENT_STREAM: ContextVar[int] = ContextVar("test_stream", default=LEGACY)
SIM = Sim()


@dataclass
class CupyStream:
    """A stream of CuPy."""

    ptr: int


@dataclass
class CupyMemory:
    """The attribute ``data`` of an array of CuPy."""

    ptr: int
    device_id: int = 0


@dataclass
class CupyArray:
    """The attributes of an array of CuPy."""

    data: CupyMemory
    shape: tuple[int, ...] = (64,)
    strides: tuple[int, ...] = (4,)
    dtype: Any = field(default_factory=lambda: np.dtype("float32"))


def current_stream_of_cupy(device_index: int) -> CupyStream:
    return CupyStream(CUPY_STREAM + device_index)


@pytest.fixture
def driver() -> Iterator[Driver]:
    fast_call.use_array_class(CupyArray, "c", current_stream_of_cupy, CODES)
    fast_call.use_array_class(DeviceArray, "d", CURRENT_STREAM, CODES)
    with recording_driver() as driver:
        yield driver


class Adder(fast_call.FastCall):
    """A kernel of two arrays with one output, which counts the calls that run in Python."""

    def __init__(self, driver: Driver, new_array: Any = None) -> None:
        self.driver, self.new_array = driver, new_array
        self.python_calls = self.allocations = 0
        driver.parameter_count = 3
        self._configure(2, 1)

    def _call(self, x: Any, y: Any, *, out: Any = None, stream: Any = None) -> Any:  # noqa: ARG002
        self.python_calls += 1
        (result,) = self.allocate(STREAM) if out is None else (out,)
        parameters = tuple(("a", index, b"") for index in range(3))
        allocate = self.allocate if out is None else None
        kernel = (FUNCTION, CONTEXT, 0, 7, 256, STREAM, 0, 0)
        self._prepare((x, y), (result,), allocate, (2,), parameters, *kernel)
        return result

    def allocate(self, stream: int) -> tuple[Any, ...]:
        self.allocations += 1
        return (self.new_array(stream),)


def cupy_arrays(*addresses: int) -> list[CupyArray]:
    return [CupyArray(CupyMemory(address)) for address in addresses]


def device_array(stream: int = LEGACY) -> DeviceArray:
    """Return an array of cudakit that looks as if a real device had its memory."""
    array = DeviceArray(SIM, "float32", (64,), Stream(LEGACY))
    array.cuda_index = 0
    array.stream = array.allocation_stream = Stream(stream)
    return array


def test_cupy_arrays_are_launched_on_the_current_stream_of_cupy(driver: Driver) -> None:
    add = Adder(driver)
    x, y, out = cupy_arrays(0x1000, 0x2000, 0x3000)
    add(x, y, out=out)
    x, y, out = cupy_arrays(0x4000, 0x5000, 0x6000)

    assert add(x, y, out=out) is out

    assert add.python_calls == 1
    assert driver.launches == [(FUNCTION, 7, 256, CUPY_STREAM, [0x4000, 0x5000, 0x6000])]
    add(x, y, out=out, stream=CupyStream(STREAM))
    assert add.python_calls == 1
    assert driver.launches[1][3] == STREAM


@pytest.mark.parametrize(
    "changes",
    [
        {"data": CupyMemory(0x1004)},
        {"data": CupyMemory(0x1000, device_id=1)},
        {"shape": (32,)},
        {"strides": (8,)},
        {"strides": (2,)},
        {"shape": (8, 8), "strides": (32, 4)},
        {"shape": (1,) * 40, "strides": (4,) * 40},
        {"shape": [64]},
        {"shape": (1 << 80,)},
        {"dtype": np.dtype(">f4")},
        {"dtype": np.dtype("float64")},
        {"dtype": ["float32"]},
        {"data": None},
    ],
)
def test_cupy_array_with_another_layout_runs_in_python(
    driver: Driver, changes: dict[str, Any]
) -> None:
    add = Adder(driver)
    x, y, out = cupy_arrays(0x1000, 0x2000, 0x3000)
    add(x, y, out=out)

    add(replace(x, **changes), y, out=out)

    assert add.python_calls == 2
    assert driver.launches == []


def test_python_function_of_the_plan_allocates_outputs(driver: Driver) -> None:
    streams: list[int] = []

    def new_array(stream: int) -> CupyArray:
        streams.append(stream)
        return CupyArray(CupyMemory(0x100 * len(streams)))

    add = Adder(driver, new_array)
    x, y = cupy_arrays(0x1000, 0x2000)
    add(x, y)

    result = add(x, y)

    assert (add.python_calls, add.allocations) == (1, 2)
    assert streams == [STREAM, CUPY_STREAM]
    assert result.data.ptr == 0x200
    assert driver.launches[0][4] == [0x1000, 0x2000, 0x200]


def test_factory_creates_arrays_with_the_attributes_of_a_constructed_array(driver: Driver) -> None:
    layout = (SIM, 0, "float32", (2, 32), (128, 4), 256)
    factory = fast_call.ArrayFactory(DeviceArray, ArrayView, CONTEXT, (layout, layout))

    first_array, second_array = factory(STREAM)

    constructed_array = DeviceArray(SIM, "float32", (2, 32))
    assert type(first_array) is DeviceArray
    assert vars(first_array).keys() == vars(constructed_array).keys()
    assert first_array.view == replace(constructed_array.view, ptr=Ptr(ALLOCATED_ADDRESS))
    assert (first_array.stream, first_array.allocation_stream) == (STREAM, STREAM)
    assert (first_array.gpu, first_array.cuda_index, first_array.nbytes) == (SIM, 0, 256)
    assert driver.memory_calls == [("allocate", 256, STREAM)] * 2
    del first_array, second_array
    assert driver.memory_calls[2:] == [("free", ALLOCATED_ADDRESS, STREAM)] * 2


def factory_adder(driver: Driver) -> Adder:
    """Return a kernel whose repeated calls allocate their output by a factory."""
    layout = (SIM, 0, "float32", (64,), (4,), 256)
    add = Adder(driver)
    add.allocate = fast_call.ArrayFactory(DeviceArray, ArrayView, CONTEXT, (layout,))  # type: ignore[method-assign]
    return add


def test_factory_allocates_outputs_without_python(driver: Driver) -> None:
    add = factory_adder(driver)
    x, y = device_array(STREAM), device_array(STREAM)
    token = CURRENT_STREAM.set(STREAM)
    add(x, y)

    result = add(x, y)

    CURRENT_STREAM.reset(token)
    assert add.python_calls == 1
    assert (result.shape, result.stream) == ((64,), STREAM)
    assert driver.launches == [(FUNCTION, 7, 256, STREAM, [x.ptr, y.ptr, ALLOCATED_ADDRESS])]


def test_factory_without_memory_or_during_a_capture_runs_in_python(driver: Driver) -> None:
    add = factory_adder(driver)
    x, y = device_array(STREAM), device_array(STREAM)
    token = CURRENT_STREAM.set(STREAM)
    add(x, y)
    driver.capturing = 1

    with pytest.raises(MemoryError):
        add(x, y)

    assert add.python_calls == 2
    driver.capturing, driver.status = 0, 2
    with pytest.raises(MemoryError):
        add(x, y)
    CURRENT_STREAM.reset(token)
    assert add.python_calls == 3
    assert driver.launches == []


@pytest.mark.parametrize(
    "layouts", [((1, 2),), ((SIM, 0, "float32", (1,), (4,), "4"),), ([SIM],), (None,) * 17]
)
def test_factory_refuses_other_layouts(layouts: Any) -> None:
    with pytest.raises(ValueError, match="six items"):
        fast_call.ArrayFactory(DeviceArray, ArrayView, CONTEXT, layouts)


def test_new_output_on_another_device_runs_in_python(driver: Driver) -> None:
    devices = iter([0, 1, 0])
    add = Adder(driver, lambda stream: CupyArray(CupyMemory(0x100, next(devices))))  # noqa: ARG005
    x, y = cupy_arrays(0x1000, 0x2000)
    add(x, y)

    assert add(x, y).data.device_id == 0
    assert add.python_calls == 2
    assert driver.launches == []


def test_misaligned_new_output_runs_in_python(driver: Driver) -> None:
    addresses = iter([0x100, 0x104, 0x200])
    add = Adder(driver, lambda stream: CupyArray(CupyMemory(next(addresses))))  # noqa: ARG005
    x, y = cupy_arrays(0x1000, 0x2000)
    add(x, y)

    assert add(x, y).data.ptr == 0x200
    assert add.python_calls == 2


def test_failed_allocation_is_repeated_in_python(driver: Driver) -> None:
    def new_array(stream: int) -> CupyArray:  # noqa: ARG001
        if add.allocations > 1:
            raise MemoryError("no memory")
        return CupyArray(CupyMemory(0x100))

    add = Adder(driver, new_array)
    x, y = cupy_arrays(0x1000, 0x2000)
    add(x, y)

    with pytest.raises(MemoryError):
        add(x, y)
    assert add.python_calls == 2


def test_arrays_of_cudakit_are_launched_on_the_stream_that_uses_them(driver: Driver) -> None:
    add = Adder(driver)
    x, y, out = (device_array() for _ in range(3))
    add(x, y, out=out)

    assert add(x, y, out=out) is out
    assert add.python_calls == 1
    assert driver.launches[0][3:] == (LEGACY, [x.ptr, y.ptr, out.ptr])

    token = CURRENT_STREAM.set(STREAM)
    add(x, y, out=out)
    CURRENT_STREAM.reset(token)
    assert add.python_calls == 2
    add(*(device_array(STREAM) for _ in range(2)), out=device_array(STREAM), stream=STREAM)
    assert add.python_calls == 2
    assert driver.launches[1][3] == STREAM
    out.stream = Stream(STREAM)
    add(x, y, out=out)
    assert add.python_calls == 3


def test_simulated_array_runs_in_python(driver: Driver) -> None:
    add = Adder(driver)
    x, y, out = (device_array() for _ in range(3))
    add(x, y, out=out)
    out.cuda_index = -1

    add(x, y, out=out)

    assert add.python_calls == 2


class Filler(fast_call.FastCall):
    """A kernel with one output and the words of a counter, which advances by 5 in each launch."""

    def __init__(self, driver: Driver, counter: Any) -> None:
        self.python_calls = 0
        driver.parameter_count = 4
        self._configure(0, 1, counter)

    def _call(self, *, out: Any, stream: Any = None) -> Any:  # noqa: ARG002
        self.python_calls += 1
        parameters = (("a", 0, b""), ("n", 0, b""), ("n", 1, b""), ("n", 2, b""))
        kernel = (FUNCTION, CONTEXT, 0, 7, 256, STREAM, 0, 5)
        self._prepare((), (out,), None, (0,), parameters, *kernel)
        return out


def test_launches_advance_the_counter(driver: Driver) -> None:
    counter = fast_call.LaunchCounter()
    assert counter.replace((0, 0, 0), (10, 20, (1 << 64) - 1))
    fill = Filler(driver, counter)
    (out,) = cupy_arrays(0x1000)
    for _ in range(3):
        assert fill(out=out) is out

    assert fill.python_calls == 1
    assert [launch[4] for launch in driver.launches] == [
        [0x1000, 10, 20, (1 << 64) - 1],
        [0x1000, 15, 20, (1 << 64) - 1],
    ]
    assert counter.read() == (20, 20, (1 << 64) - 1)
    assert not counter.replace((19, 20, 0), (0, 0, 0))


def test_launches_of_several_threads_have_different_positions(driver: Driver) -> None:
    counter = fast_call.LaunchCounter()
    fill = Filler(driver, counter)
    (out,) = cupy_arrays(0x1000)
    fill(out=out)

    def launch_and_advance() -> None:
        for _ in range(100):
            fill(out=out)
            while not counter.replace(words := counter.read(), (words[0] + 1, *words[1:])):
                pass

    threads = [Thread(target=launch_and_advance) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    positions = [launch[4][1] for launch in driver.launches]
    assert fill.python_calls == 1
    assert len(set(positions)) == len(positions) == 400
    assert counter.read()[0] == 400 * (5 + 1)


def test_counter_is_advanced_in_python_at_its_end_in_a_capture_and_once_frozen(
    driver: Driver,
) -> None:
    counter = fast_call.LaunchCounter()
    fill = Filler(driver, counter)
    (out,) = cupy_arrays(0x1000)
    fill(out=out)
    assert counter.replace((0, 0, 0), ((1 << 64) - 5, 0, 0))
    fill(out=out)
    assert fill.python_calls == 2
    counter.replace(counter.read(), (0, 0, 0))
    driver.capturing = 1
    fill(out=out)
    assert fill.python_calls == 3
    driver.capturing = 0
    assert not counter.freeze((1, 0, 0))
    assert counter.freeze((0, 0, 0))
    assert not counter.replace((0, 0, 0), (1, 0, 0))
    fill(out=out)

    assert fill.python_calls == 4
    assert counter.read() == (0, 0, 0)
    assert driver.launches == []


class StoredCounterFiller(Filler):
    """A kernel whose counter is in device memory after the first call in Python."""

    def _call(self, *, out: Any, stream: Any = None) -> Any:
        if not self.python_calls:
            return super()._call(out=out, stream=stream)
        self.python_calls += 1
        parameters = (("a", 0, b""), *(("c", 0, b"12345678") for _ in range(3)))
        self._prepare(
            (), (out,), None, (0,), parameters, FUNCTION + 1, CONTEXT, 0, 7, 256, STREAM, 0, 0
        )
        return out


def test_kernel_of_a_counter_in_device_memory_replaces_the_prepared_one(driver: Driver) -> None:
    counter = fast_call.LaunchCounter()
    fill = StoredCounterFiller(driver, counter)
    (out,) = cupy_arrays(0x1000)
    fill(out=out)
    counter.freeze((0, 0, 0))
    fill(out=out)

    fill(out=out)
    driver.capturing = 1
    fill(out=out)

    assert fill.python_calls == 2
    assert [launch[0] for launch in driver.launches] == [FUNCTION + 1] * 2
    assert driver.launches[0][4][1:] == [int.from_bytes(b"12345678", "little")] * 3


def test_words_of_a_counter_need_a_counter(driver: Driver) -> None:
    fill = Filler(driver, fast_call.LaunchCounter())
    fill._configure(0, 1)
    (out,) = cupy_arrays(0x1000)

    fill(out=out)
    fill(out=out)

    assert fill.python_calls == 2


FUNCTION_OF_16_WORDS = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 16)


def test_stream_call_passes_fixed_arguments_and_the_stream() -> None:
    calls: list[tuple[int, ...]] = []

    def record(*words: int) -> int:
        calls.append(words)
        return 7

    function = FUNCTION_OF_16_WORDS(record)
    address = ctypes.cast(function, ctypes.c_void_p).value
    fixed = (1 << 63, *range(14))

    assert fast_call.StreamCall(address, fixed)(STREAM) == 7
    assert calls == [(*fixed, STREAM)]
    for bad_arguments in ((), (1, 2), ("text",)):
        with pytest.raises(TypeError):
            fast_call.StreamCall(address, fixed)(*bad_arguments)
    with pytest.raises(ValueError, match="15 arguments"):
        fast_call.StreamCall(address, (1, 2))
    with pytest.raises(OverflowError):
        fast_call.StreamCall(address, (-1,) * 15)
    assert len(calls) == 1


def test_memory_is_freed_on_its_stream_with_the_last_reference(driver: Driver) -> None:
    memory = fast_call.StreamMemory(CONTEXT, 400, STREAM)
    other_reference = memory
    assert memory.ptr == ALLOCATED_ADDRESS
    del memory
    assert driver.memory_calls == [("allocate", 400, STREAM)]
    del other_reference

    assert driver.memory_calls[1:] == [("free", ALLOCATED_ADDRESS, STREAM)]


def test_failed_allocation_raises_memory_error_and_frees_nothing(driver: Driver) -> None:
    driver.status = 2

    with pytest.raises(MemoryError):
        fast_call.StreamMemory(CONTEXT, 400, STREAM)
    assert [call[0] for call in driver.memory_calls] == ["allocate"]


def test_memory_cannot_be_allocated_without_a_driver() -> None:
    with pytest.raises(MemoryError):
        fast_call.StreamMemory(CONTEXT, 400, STREAM)
