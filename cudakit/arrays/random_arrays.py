"""The arrays that a generator fills: in device memory, or in numpy for the same numbers on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import index
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np

from cudakit.arrays.calls import stream_of
from cudakit.arrays.launch import NO_SCRATCH
from cudakit.arrays.random import (
    COUNTER_BYTES,
    NO_COUNTER,
    THREADS,
    Draw,
    RandomKernels,
    fill_on_host,
)
from cudakit.arrays.random_values import Counter
from cudakit.errors import UsageError
from cudakit.gpu.api import Gpu, Stream
from cudakit.gpu.api.arrays import BF16, contiguous_strides, decode
from cudakit.gpu.arrays import operand_of, shared_device
from cudakit.gpu.device_array import DeviceArray, array_factory, is_captured, order_streams
from cudakit.gpu.fast_call import FastCall, LaunchCounter, prepare_call

if TYPE_CHECKING:
    from cudakit.gpu._fast_call import ArrayFactory


Shape: TypeAlias = int | Sequence[int]

# Maximum number of prepared launches of a generator (one for each method and combination of arguments), and
# of stored functions that create arrays.
_MAX_FILLS = 64


class DrawRequest(NamedTuple):
    """A call of a generator's method: its arguments without the array to fill."""

    default_dtype: str
    dtype: str | None  # dtype that the caller requires; None: any for ``out``, else the default
    arguments: tuple[float, ...]
    # Function of the number of elements, the dtype and the arguments.
    make_draw: Callable[..., Draw]


class DeviceFiller:
    """Fills arrays in the memory of one device for one generator, whose counter it advances."""

    def __init__(self, kernels: RandomKernels, counter: GeneratorCounter) -> None:
        self.counter, self.kernels = counter, kernels
        self._fills: dict[DrawRequest, _PreparedFill] = {}
        # Functions that create arrays, by shape and dtype; None if only the constructor can create them.
        self._array_factories: dict[object, ArrayFactory | None] = {}

    def for_counter(self, counter: GeneratorCounter) -> DeviceFiller:
        """Return a filler for another generator on the same device."""
        return DeviceFiller(self.kernels, counter)

    def fill(self, request: DrawRequest, shape: Shape | None, out: Any, stream: object) -> Any:
        """Fill ``out``, or a new array of a shape, and return the array.

        Raises UsageError if ``out`` cannot be filled, or differs from a shape or dtype that is not None.
        """
        fill = self._fills.get(request)
        if fill is None:
            if len(self._fills) >= _MAX_FILLS:
                self._fills.clear()
            fill = self._fills[request] = _PreparedFill(self, request)
        if out is None:
            out = self._new_array(shape, request.dtype or request.default_dtype, stream)
        elif shape is not None:
            return fill(out=out, stream=stream, shape=shape)
        return fill(out=out, stream=stream)

    def _new_array(self, shape: Shape | None, dtype: str, stream: object) -> DeviceArray:
        """Allocate an array. Raises UsageError during a capture of the stream."""
        gpu = self.kernels.gpu
        calling_stream = stream_of(stream, gpu)
        with suppress(MemoryError):
            if factory := self._array_factory(shape, dtype):
                return cast("DeviceArray", factory(calling_stream)[0])
        if is_captured(gpu, calling_stream):
            raise UsageError(
                "a new array cannot be allocated while the stream is captured", hint="pass out="
            )
        # The constructor reports errors of the driver.
        return DeviceArray(gpu, dtype, _check_shape(shape), calling_stream)

    def _array_factory(self, shape: Shape | None, dtype: str) -> ArrayFactory | None:
        """Return the function that creates arrays of a shape, or None if only the constructor can.

        Raises UsageError for an invalid shape.
        """
        # Other shapes are left to the constructor: 1.0 is an error, although it equals the key 1.
        if type(shape) is not int and not (
            type(shape) is tuple and all(type(extent) is int for extent in shape)
        ):
            return None
        key = (shape, dtype)
        if key not in self._array_factories:
            if len(self._array_factories) >= _MAX_FILLS:
                self._array_factories.clear()
            layouts = [(dtype, _check_shape(shape))]
            self._array_factories[key] = array_factory(self.kernels.gpu, layouts)
        return self._array_factories[key]


class _PreparedFill(FastCall):
    """One method of a generator with fixed arguments; equal calls are launched without Python code."""

    def __init__(self, filler: DeviceFiller, request: DrawRequest) -> None:
        self._filler, self._request = filler, request
        self._configure(0, 1, filler.counter.words)

    def _call(self, *, out: Any, stream: object = None, shape: Shape | None = None) -> Any:
        """Check the array, enqueue the kernel, and prepare equal calls."""
        kernels, counter, request = self._filler.kernels, self._filler.counter, self._request
        gpu, operand = kernels.gpu, operand_of(out, "out")
        view = operand.view
        if operand.device != (gpu if gpu.simulated else _ordinal(gpu)):
            raise UsageError(
                f"out is in memory of {_name(operand.device)}, the generator is on {_name(gpu)}",
                hint="create the generator with the device of the array",
            )
        if view.read_only:
            raise UsageError(
                "out is read-only, as arrays of JAX are, and tensors that require grad",
                hint="pass tensor.detach(), or a shape for a new array",
            )
        item_bytes = BF16.size_bytes if view.dtype == "bfloat16" else np.dtype(view.dtype).itemsize
        if view.ptr % item_bytes:
            raise UsageError(f"out is misaligned: {view.dtype} at address {view.ptr:#x}")
        _check_output(view.shape, view.strides, item_bytes, view.dtype, request, shape)
        calling_stream = stream_of(stream, gpu, operand.library)
        if operand.stream is not None:
            order_streams(gpu, Stream(operand.stream), calling_stream)
        draw = request.make_draw(view.size, view.dtype, *request.arguments)
        if is_captured(gpu, calling_stream):
            counter.move_to_device(gpu, kernels)
        start = counter.take(partial(advance_counter, draw.blocks))
        stored = NO_COUNTER
        if start is None and counter.device_counter:
            stored = counter.device_counter.address
        kernels.fill(view.ptr, draw, start or Counter(0, 0, 0), calling_stream, stored)
        if isinstance(out, DeviceArray):
            out.record_use(calling_stream)
            out.stream = calling_stream
        # Fast calls take the driver's handles of streams, which only shared devices use.
        if draw.cuda_blocks and not gpu.simulated and gpu is shared_device(_ordinal(gpu)):
            words: list[tuple[str, int, np.generic | None]] = [
                ("c", 0, np.uint64(0)) if stored else ("n", word, None)
                for word in range(len(Counter._fields))
            ]
            prepare_call(
                self,
                gpu,
                kernels.kernel(draw, has_stored_counter=bool(stored)),
                inputs=(),
                outputs=(out,),
                allocate=None,
                results=(0,),
                parameters=[
                    ("a", 0, None),
                    ("c", 0, np.uint64(draw.count)),
                    *words,
                    ("c", 0, np.uint64(stored)),
                    ("c", 0, np.uint64(draw.blocks)),
                    *(("c", 0, parameter) for parameter in draw.parameters),
                ],
                blocks=draw.cuda_blocks,
                threads=THREADS,
                stream=calling_stream,
                scratch=NO_SCRATCH,
                counter_step=0 if stored else draw.blocks,
            )
        return out


class HostFiller:
    """Fills numpy arrays with the numbers that the kernels compute."""

    def __init__(self, counter: GeneratorCounter) -> None:
        self.counter = counter

    def for_counter(self, counter: GeneratorCounter) -> HostFiller:
        """Return a filler for another generator."""
        return HostFiller(counter)

    def fill(self, request: DrawRequest, shape: Shape | None, out: Any, stream: object) -> Any:
        """Fill ``out``, or a new array of a shape, and return the array; raises as ``DeviceFiller.fill``."""
        if stream is not None:
            raise UsageError('a generator with device="numpy" has no streams')
        if out is None:
            dtype = request.dtype or request.default_dtype
            out = np.empty(_check_shape(shape), "float32" if dtype == "bfloat16" else dtype)
        else:
            if not isinstance(out, np.ndarray):
                raise UsageError(
                    f'out is {type(out).__name__}, not a numpy array, as device="numpy" needs',
                    hint="create the generator without device to fill arrays on the GPU",
                )
            if not out.flags.writeable:
                raise UsageError("out is read-only")
            dtype = out.dtype.name
            _check_output(out.shape, out.strides, out.itemsize, dtype, request, shape)
        draw = request.make_draw(out.size, dtype, *request.arguments)
        start = self.counter.take(partial(advance_counter, draw.blocks))
        if start is None:
            raise AssertionError("a counter of numpy is in device memory")
        elements = out.reshape(-1)
        if dtype == "bfloat16" and out.dtype == np.float32:
            # numpy has no bfloat16: float32 represents all bfloat16 values exactly.
            bits = np.empty(draw.count, draw.storage)
            fill_on_host(bits, draw, start)
            elements[:] = decode(bits, BF16)
        else:
            fill_on_host(elements.view(draw.storage), draw, start)
        return out


def advance_counter(blocks: int, counter: Counter) -> Counter:
    """Return a counter moved by a number of Philox blocks. Raises UsageError past the end of the sequence."""
    position = counter.position + blocks
    if not 0 <= position < 1 << 64:
        raise UsageError(f"the position must be an integer from 0 to 2^64 - 1, not {position}")
    return counter._replace(position=position)


def _check_shape(shape: Shape | None) -> tuple[int, ...]:
    """Return a shape as a tuple. Raises UsageError unless it has non-negative integers."""
    if shape is None:
        raise UsageError("neither a shape nor out is given")
    try:
        extents = tuple(map(index, shape if isinstance(shape, Sequence) else (shape,)))
    except TypeError:
        extents = (-1,)
    if min(extents, default=0) < 0:
        raise UsageError(
            f"a shape has integers of at least 0, not {shape!r:.60}", hint="pass an array as out="
        )
    if math.prod(extents) >= 1 << 62:
        raise UsageError(f"an array of shape {extents} does not fit in memory")
    return extents


def _check_output(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    item_bytes: int,
    dtype: str,
    request: DrawRequest,
    expected_shape: Shape | None,
) -> None:
    """Raise UsageError unless an array is contiguous, and has the shape and the dtype of a call."""
    dense = contiguous_strides(shape, item_bytes)
    if math.prod(shape) and any(
        extent > 1 and stride != dense_stride
        for extent, stride, dense_stride in zip(shape, strides, dense, strict=True)
    ):
        raise UsageError(
            f"out is not contiguous: shape {shape}, strides {strides} bytes",
            hint="pass a contiguous array, and copy from it",
        )
    if expected_shape is not None and shape != _check_shape(expected_shape):
        raise UsageError(f"out has shape {shape}, not {_check_shape(expected_shape)}")
    if request.dtype is not None and dtype != request.dtype:
        raise UsageError(f"out has dtype {dtype}, not {request.dtype}")


def _ordinal(gpu: Gpu) -> int:
    return int(getattr(gpu, "ordinal", 0))


def _name(device: Gpu | int) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(getattr(device, "name", device))


# --- The counter of a generator: its position, sequence and seed, in host memory or in device memory

CounterChange = Callable[[Counter], Counter]


class GeneratorCounter:
    """The counter of one generator, which several threads can use.

    The counter is in host memory until a call of the generator is captured in a CUDA graph. From then on the
    counter is in device memory, where every launch reads and advances it, also in each replay of the graph.
    """

    def __init__(self, start: Counter) -> None:
        # Counter in host memory; prepared launches advance it in C.
        self.words = LaunchCounter()
        self.words.replace((0, 0, 0), start)
        # Counter in device memory; None while the counter is in host memory.
        self.device_counter: DeviceCounter | None = None
        self._lock = Lock()  # held while the counter is moved, or changed in device memory

    def read(self) -> Counter:
        """Return the counter; if it is in device memory, wait for the work of the device first."""
        if self.device_counter is None:
            return Counter(*self.words.read())
        with self._lock:
            return self.device_counter.read()

    def seed_and_sequence(self) -> tuple[int, int]:
        """Return the seed and the sequence number, without waiting for the device."""
        device_counter = self.device_counter
        counter = device_counter.stored_counter if device_counter else Counter(*self.words.read())
        return counter.seed, counter.sequence

    def take(self, change_counter: CounterChange) -> Counter | None:
        """Replace a counter in host memory by ``change_counter(counter)``.

        Returns the counter before the change. If the counter is in device memory, changes nothing and returns
        None.
        """
        while self.device_counter is None:
            counter = Counter(*self.words.read())
            if self.words.replace(counter, change_counter(counter)):
                return counter
            with self._lock:  # another thread changed the counter, or is moving it to device memory
                pass
        return None

    def change(self, change_counter: CounterChange) -> None:
        """Replace the counter by ``change_counter(counter)``.

        If the counter is in device memory, waits for the device first.
        """
        if self.take(change_counter) is not None or self.device_counter is None:
            return
        with self._lock:
            self.device_counter.store(change_counter(self.device_counter.read()))

    def move_to_device(self, gpu: Gpu, kernels: RandomKernels) -> None:
        """Move the counter to device memory, also during a stream capture."""
        with self._lock:
            if self.device_counter is None:
                with gpu.relaxed():
                    device_counter = DeviceCounter(gpu, kernels)
                    is_frozen = False
                    while not is_frozen:  # repeat if another thread changed the counter
                        counter = Counter(*self.words.read())
                        device_counter.store(counter)
                        is_frozen = self.words.freeze(counter)
                self.device_counter = device_counter


class DeviceCounter:
    """A counter in device memory, which is never freed: graphs that use it may outlive the generator."""

    def __init__(self, gpu: Gpu, kernels: RandomKernels) -> None:
        self._gpu, self._kernels = gpu, kernels
        self.address = gpu.malloc(COUNTER_BYTES)
        # Counter that the host stored last. Launches change only the position.
        self.stored_counter = Counter(0, 0, 0)

    def store(self, counter: Counter) -> None:
        """Write a counter to the memory, and wait for the write."""
        with self._temporary_stream() as stream:
            self._kernels.store_counter(self.address, counter, stream)
        self.stored_counter = counter

    def read(self) -> Counter:
        """Wait for all work of the device, and return the counter."""
        gpu = self._gpu
        gpu.sync()
        host = gpu.host_malloc(COUNTER_BYTES)
        try:
            with self._temporary_stream() as stream:
                gpu.copy(host, self.address, COUNTER_BYTES, stream)
            position, sequence, seed, _ = gpu.host_view(host, COUNTER_BYTES).cast("Q")
            return Counter(position, sequence, seed)
        finally:
            gpu.host_free(host)

    @contextmanager
    def _temporary_stream(self) -> Iterator[Stream]:
        """Yield a new stream, because a capture can forbid the default stream; wait for its work."""
        stream = self._gpu.stream(blocking=False)
        try:
            yield stream
            self._gpu.sync_stream(stream)
        finally:
            self._gpu.destroy_stream(stream)
