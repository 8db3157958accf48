"""The arrays that a generator fills: in device memory, or in numpy for the same numbers on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from operator import index
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from cudakit.arrays.calls import stream_of
from cudakit.arrays.launch import NO_SCRATCH
from cudakit.arrays.random import COUNTER_BYTES, NO_COUNTER, Draw, RandomKernels, fill_on_host
from cudakit.arrays.random_kernel_source import THREADS
from cudakit.arrays.random_values import Counter
from cudakit.errors import UsageError
from cudakit.gpu.api import LEGACY, Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import BF16, contiguous_strides, decode
from cudakit.gpu.arrays import operand_of, shared_device
from cudakit.gpu.device_array import DeviceArray, array_factory, is_captured, order_streams
from cudakit.gpu.fast_call import FastCall, LaunchCounter, prepare_call

if TYPE_CHECKING:
    from cudakit.gpu._fast_call import ArrayFactory
    from cudakit.gpu.cuda.device import Cuda


Shape: TypeAlias = int | Sequence[int]

# Maximum number of prepared launches of a generator (one for each method and combination of arguments), and
# of stored functions that create arrays.
_MAX_FILLS = 64


@dataclass(frozen=True, slots=True)
class Output:
    """The array that one call fills and returns."""

    array: Any
    dtype: str
    element_count: int
    size_bytes: int
    ptr: Ptr  # Address of the elements; 0 in host memory.
    stream: Stream  # Stream of the call; LEGACY in host memory.


class DrawRequest(NamedTuple):
    """A call of a generator's method: its arguments without the array to fill."""

    default_dtype: str
    dtype: str | None  # dtype that the caller requires; None: any for ``out``, else the default
    arguments: tuple[float, ...]
    # Function of the output and the arguments that returns the draw.
    make_draw: Callable[[Output, tuple[float, ...]], Draw]


class ArrayFiller(Protocol):
    """Fills arrays for one generator, whose counter it advances."""

    counter: GeneratorCounter

    def fill(self, request: DrawRequest, shape: Shape | None, out: Any, stream: object) -> Any:
        """Fill ``out``, or a new array of a shape, and return the array.

        Raises UsageError if ``out`` cannot be filled, or differs from a shape or dtype that is not None.
        """

    def for_counter(self, counter: GeneratorCounter) -> ArrayFiller:
        """Return a filler for another generator on the same device."""


class DeviceFiller:
    """Fills arrays in the memory of one device."""

    def __init__(self, kernels: SharedKernels, counter: GeneratorCounter) -> None:
        self.counter, self._kernels = counter, kernels
        self._fills: dict[DrawRequest, _PreparedFill] = {}
        # Functions that create arrays, by shape and dtype; None if only the constructor can create them.
        self._array_factories: dict[object, ArrayFactory | None] = {}

    def for_counter(self, counter: GeneratorCounter) -> DeviceFiller:
        return DeviceFiller(self._kernels, counter)

    def fill(self, request: DrawRequest, shape: Shape | None, out: Any, stream: object) -> Any:
        fill = self._fills.get(request)
        if fill is None:
            if len(self._fills) >= _MAX_FILLS:
                self._fills.clear()
            fill = self._fills[request] = _PreparedFill(self._kernels.gpu, self, request)
        if out is None:
            out = self._new_array(shape, request.dtype or request.default_dtype, stream)
        elif shape is not None:
            return fill(out=out, stream=stream, shape=shape)
        return fill(out=out, stream=stream)

    def fill_output(self, fill: _PreparedFill, request: DrawRequest, output: Output) -> None:
        """Enqueue the kernel for an output, and prepare the fast path for equal calls."""
        gpu, counter = self._kernels.gpu, self.counter
        draw = request.make_draw(output, request.arguments)
        kernels = self._kernels.get_kernels()
        if is_captured(gpu, output.stream):
            counter.move_to_device(gpu, kernels)
        start = counter.take(partial(advance_counter, draw.blocks))
        if start is not None:
            kernels.fill(output.ptr, draw, start, output.stream)
        elif counter.device_counter:
            counter.device_counter.fill(output.ptr, draw, output.stream)
        if isinstance(output.array, DeviceArray):
            output.array.record_use(output.stream)
            output.array.stream = output.stream
        if draw.cuda_blocks and self._kernels.is_shared_device():
            address = counter.device_counter.address if counter.device_counter else NO_COUNTER
            _prepare(fill, cast("Cuda", gpu), kernels, draw, output, address)

    def _new_array(self, shape: Shape | None, dtype: str, stream: object) -> DeviceArray:
        """Allocate an array. Raises UsageError during a capture of the stream."""
        gpu = self._kernels.gpu
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
            self._array_factories[key] = array_factory(self._kernels.gpu, layouts)
        return self._array_factories[key]


class SharedKernels:
    """The random kernels of one device, which all generators of the device share."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._kernels: RandomKernels | None = None

    def get_kernels(self) -> RandomKernels:
        """Return the kernels; the first call loads them, also during a stream capture."""
        if self._kernels is None:
            with self.gpu.relaxed():
                self._kernels = RandomKernels(self.gpu)
        return self._kernels

    def is_shared_device(self) -> bool:
        """Return whether the device is a real one whose streams have the handles of the driver."""
        return not self.gpu.simulated and self.gpu is shared_device(_ordinal(self.gpu))


class _PreparedFill(FastCall):
    """One method of a generator with fixed arguments; equal calls are launched without Python code."""

    def __init__(self, gpu: Gpu, filler: DeviceFiller, request: DrawRequest) -> None:
        self._gpu, self._filler, self._request = gpu, filler, request
        self._configure(0, 1, filler.counter.words)

    def _call(self, *, out: Any, stream: object = None, shape: Shape | None = None) -> Any:
        """Check the array, enqueue the kernel, and prepare equal calls."""
        output = self._check_output(out, stream, shape)
        self._filler.fill_output(self, self._request, output)
        return out

    def _check_output(self, out: Any, stream: object, shape: Shape | None) -> Output:
        """Return the output. Raises UsageError if the kernel cannot fill the array."""
        gpu, operand = self._gpu, operand_of(out, "out")
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
        item_bytes = _item_bytes(view.dtype)
        if view.ptr % item_bytes:
            raise UsageError(f"out is misaligned: {view.dtype} at address {view.ptr:#x}")
        _check_layout(view.shape, view.strides, item_bytes)
        _check_output_type(view.shape, shape, view.dtype, self._request.dtype)
        calling_stream = stream_of(stream, gpu, operand.library)
        if operand.stream is not None:
            order_streams(gpu, Stream(operand.stream), calling_stream)
        size_bytes = view.size * item_bytes
        return Output(out, view.dtype, view.size, size_bytes, view.ptr, calling_stream)


class HostFiller:
    """Fills numpy arrays with the numbers that the kernels compute."""

    def __init__(self, counter: GeneratorCounter) -> None:
        self.counter = counter

    def for_counter(self, counter: GeneratorCounter) -> HostFiller:
        return HostFiller(counter)

    def fill(self, request: DrawRequest, shape: Shape | None, out: Any, stream: object) -> Any:
        output = self._output(request, shape, out, stream)
        draw = request.make_draw(output, request.arguments)
        start = self.counter.take(partial(advance_counter, draw.blocks))
        if start is None:
            raise AssertionError("a counter of numpy is in device memory")
        elements = output.array.reshape(-1)
        if output.dtype == "bfloat16" and output.array.dtype == np.float32:
            # numpy has no bfloat16: float32 represents all bfloat16 values exactly.
            bfloat16_bits = np.empty(draw.count, draw.storage)
            fill_on_host(bfloat16_bits, draw, start)
            elements[:] = decode(bfloat16_bits, BF16)
        else:
            fill_on_host(elements.view(draw.storage), draw, start)
        return output.array

    def _output(
        self, request: DrawRequest, shape: Shape | None, out: Any, stream: object
    ) -> Output:
        if stream is not None:
            raise UsageError('a generator with device="numpy" has no streams')
        if out is None:
            dtype = request.dtype or request.default_dtype
            storage = "float32" if dtype == "bfloat16" else dtype
            array = np.empty(_check_shape(shape), storage)
            return Output(array, dtype, array.size, array.nbytes, Ptr(0), LEGACY)
        if not isinstance(out, np.ndarray):
            raise UsageError(
                f'out is {type(out).__name__}, not a numpy array, as device="numpy" needs',
                hint="create the generator without device to fill arrays on the GPU",
            )
        if not out.flags.writeable:
            raise UsageError("out is read-only")
        _check_layout(out.shape, out.strides, out.itemsize)
        _check_output_type(out.shape, shape, out.dtype.name, request.dtype)
        return Output(out, out.dtype.name, out.size, out.nbytes, Ptr(0), LEGACY)


def advance_counter(blocks: int, counter: Counter) -> Counter:
    """Return a counter moved by a number of Philox blocks. Raises UsageError past the end of the sequence."""
    position = counter.position + blocks
    if not 0 <= position < 1 << 64:
        raise UsageError(f"the position must be an integer from 0 to 2^64 - 1, not {position}")
    return counter._replace(position=position)


def _prepare(
    fill: _PreparedFill,
    gpu: Cuda,
    kernels: RandomKernels,
    draw: Draw,
    output: Output,
    stored_counter: Ptr,
) -> None:
    """Prepare equal calls of a real device, so that they run without Python code.

    ``stored_counter`` is the address of the counter; NO_COUNTER if the counter is in host memory.
    """
    has_stored_counter = stored_counter != NO_COUNTER
    counter_words: list[tuple[str, int, np.generic | None]] = [
        ("c", 0, np.uint64(0)) if has_stored_counter else ("n", word, None)
        for word in range(len(Counter._fields))
    ]
    prepare_call(
        fill,
        gpu,
        kernels.kernel(draw, has_stored_counter=has_stored_counter),
        inputs=(),
        outputs=(output.array,),
        allocate=None,
        results=(0,),
        parameters=[
            ("a", 0, None),
            ("c", 0, np.uint64(draw.count)),
            *counter_words,
            ("c", 0, np.uint64(stored_counter)),
            ("c", 0, np.uint64(draw.blocks)),
            *(("c", 0, parameter) for parameter in draw.parameters),
        ],
        blocks=draw.cuda_blocks,
        threads=THREADS,
        stream=output.stream,
        scratch=NO_SCRATCH,
        counter_step=0 if has_stored_counter else draw.blocks,
    )


@cache
def _item_bytes(dtype: str) -> int:
    return BF16.size_bytes if dtype == "bfloat16" else np.dtype(dtype).itemsize


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


def _check_layout(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> None:
    expected_strides = contiguous_strides(shape, item_bytes)
    if strides == expected_strides or not math.prod(shape):
        return
    stride_pairs = zip(strides, expected_strides, strict=True)
    if any(
        extent > 1 and stride != expected_stride
        for extent, (stride, expected_stride) in zip(shape, stride_pairs, strict=True)
    ):
        raise UsageError(
            f"out is not contiguous: shape {shape}, strides {strides} bytes",
            hint="pass a contiguous array, and copy from it",
        )


def _check_output_type(
    shape: tuple[int, ...],
    expected_shape: Shape | None,
    dtype: str,
    expected_dtype: str | None,
) -> None:
    if expected_shape is not None and shape != _check_shape(expected_shape):
        raise UsageError(f"out has shape {shape}, not {_check_shape(expected_shape)}")
    if expected_dtype is not None and dtype != expected_dtype:
        raise UsageError(f"out has dtype {dtype}, not {expected_dtype}")


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
        kernels.load_stored_kernels()
        self.address = gpu.malloc(COUNTER_BYTES)
        # Counter that the host stored last. Launches change only the position.
        self.stored_counter = Counter(0, 0, 0)

    def fill(self, destination: Ptr, draw: Draw, stream: Stream) -> None:
        """Enqueue the kernel of a draw; the kernel reads the counter and advances it."""
        self._kernels.fill_from_stored_counter(destination, draw, self.address, stream)

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
