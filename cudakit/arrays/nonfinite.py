"""Count NaN and infinite elements of buffers, with one kernel launch for each buffer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from threading import Lock
from typing import Any, Literal, NamedTuple, TypeVar, overload

import numpy as np

from cudakit.arrays.calls import stream_of
from cudakit.arrays.launch import LoadedKernels, cuda_source
from cudakit.errors import UsageError
from cudakit.gpu.api import Argument, Gpu, Kernels, Ptr, Stream
from cudakit.gpu.api.arrays import ArrayView, Launch, host_kernel
from cudakit.gpu.arrays import operand_of, shared_device
from cudakit.gpu.device_array import DeviceArray, order_streams

# Bytes of the two counters, of NaN and of infinite elements.
COUNTER_BYTES = 16
_VECTOR_BYTES = 16
_THREADS = 256
# Maximum number of blocks: enough to fill all GPUs; each thread then reads several vectors at once.
_MAX_BLOCKS = 2048


class _FloatFormat(NamedTuple):
    """The bits of a floating-point format: an element with all exponent bits is infinite or NaN."""

    storage_dtype: str  # Name of the unsigned numpy dtype that holds the bits.
    cuda_type: str
    exponent_mask: int
    mantissa_mask: int

    @property
    def size_bytes(self) -> int:
        """The size of an element in bytes."""
        return np.dtype(self.storage_dtype).itemsize


_FORMATS = {
    "float64": _FloatFormat("u8", "unsigned long long", 0x7FF << 52, (1 << 52) - 1),
    "float32": _FloatFormat("u4", "unsigned int", 0xFF << 23, (1 << 23) - 1),
    "float16": _FloatFormat("u2", "unsigned short", 0x1F << 10, (1 << 10) - 1),
    "bfloat16": _FloatFormat("u2", "unsigned short", 0xFF << 7, (1 << 7) - 1),
}

_TEMPLATE = cuda_source("nonfinite.cu")


SOURCE = _TEMPLATE + "".join(
    f"""
extern "C" __global__ void cudakit_nonfinite_{name}(u64* counters, const {cuda_type}* data, u64 count) {{
    count_nonfinite<{cuda_type}>(counters, data, count, {exponent:#x}ull, {mantissa:#x}ull);
}}
"""
    for name, (_, cuda_type, exponent, mantissa) in _FORMATS.items()
)


class NonFiniteKernels(LoadedKernels):
    """The counting kernels of one device, loaded until ``close``."""

    def __init__(self, gpu: Kernels) -> None:
        super().__init__(gpu, SOURCE, [f"cudakit_nonfinite_{name}" for name in _FORMATS])

    def count(self, counters: Ptr, data: Ptr, count: int, dtype: str, stream: Stream) -> None:
        """Add the numbers of NaN and of infinite elements to two 64-bit counters.

        ``data`` has ``count`` elements at an address that is a multiple of the element's size.
        """
        vector_count = -(-count * _FORMATS[dtype].size_bytes // _VECTOR_BYTES)
        block_count = min(-(-vector_count // _THREADS), _MAX_BLOCKS)
        args: tuple[Argument, ...] = (counters, data, np.uint64(count))
        name = f"cudakit_nonfinite_{dtype}"
        if block_count:
            self.launch(name, args, stream, grid=block_count, block=_THREADS)


def _register_host_kernel(name: str, float_format: _FloatFormat) -> None:
    """Register the host kernel of a format for simulated devices."""

    @host_kernel(f"cudakit_nonfinite_{name}")
    def count_on_host(launch: Launch, counters: Ptr, data: Ptr, count: np.uint64) -> None:
        bits: Any = launch.read(data, float_format.storage_dtype, int(count))
        is_special = (
            bits & bits.dtype.type(float_format.exponent_mask) == float_format.exponent_mask
        )
        is_nan = is_special & (bits & bits.dtype.type(float_format.mantissa_mask) != 0)
        nan_count, special_count = np.count_nonzero(is_nan), np.count_nonzero(is_special)
        if special_count:
            new_counts = np.array([nan_count, special_count - nan_count], np.uint64)
            launch.atomic(counters, np.uint64, 2)[:] += new_counts


for _name, _format in _FORMATS.items():
    _register_host_kernel(_name, _format)


# --- Counts of NaN and infinite elements, and a loss scaler that uses them ------------------------

# The dtype of the real and the imaginary part, by the dtype of a complex array.
_PART_DTYPES = {"complex64": "float32", "complex128": "float64"}

_Array = TypeVar("_Array")


class NonFinite(NamedTuple):
    """The numbers of NaN and of infinite elements."""

    nan: int
    inf: int


@overload
def count_nonfinite(*arrays: object, stream: object = None) -> int: ...
@overload
def count_nonfinite(
    *arrays: object, separately: Literal[True], stream: object = None
) -> NonFinite: ...
@overload
def count_nonfinite(*arrays: object, out: _Array, stream: object = None) -> _Array: ...
def count_nonfinite(
    *arrays: object, separately: bool = False, out: Any = None, stream: object = None
) -> Any:
    """Return the number of NaN and infinite elements of arrays in device memory.

    Arrays are float64, float32, float16, bfloat16 or complex (each part counts), of any library, on one
    device, in any layout without gaps; arrays of integers have no such elements. Each array is read once, by
    one kernel. With ``separately`` the result is a tuple ``(nan, inf)``. ``stream`` is a stream of any
    library; the default is the current stream of the first array's library.

    The call waits for the result. With ``out``, an array of two int64 or uint64 in device memory, the call
    writes the numbers of NaN and of infinite elements there, does not wait, and returns ``out``; a CUDA graph
    can capture it.

    Raises UsageError for other arrays, and without ``out`` during the capture of the stream.

    >>> gradients = cudakit.to_device([1.0, float("nan"), float("inf"), -float("inf")], "sim")
    >>> cudakit.count_nonfinite(gradients)
    3
    >>> cudakit.count_nonfinite(gradients, separately=True)
    NonFinite(nan=1, inf=2)
    """
    if not arrays:
        raise UsageError("no array is given")
    operands = [operand_of(array, f"array {index}") for index, array in enumerate(arrays)]
    views = [_float_view(operand.view, index) for index, operand in enumerate(operands)]
    if out is not None:
        operands.append(operand_of(out, "out"))
        view = operands[-1].view
        if (
            view.dtype not in ("int64", "uint64")
            or view.shape != (2,)
            or view.strides != (COUNTER_BYTES // 2,)
            or view.read_only
        ):
            raise UsageError(
                f"out is {view.dtype} of shape {view.shape}, not a writable array of two int64 or uint64"
            )
    device = operands[0].device
    if any(operand.device != device for operand in operands):
        raise UsageError("the arrays are on several devices", hint="count on each device")
    counter = _counter_of(device) if isinstance(device, int) else _Counter(device)
    calling_stream = stream_of(stream, counter.gpu, operands[0].library)
    for operand in operands:
        if operand.stream is not None:
            order_streams(counter.gpu, Stream(operand.stream), calling_stream)
    if out is not None:
        counter.add_counts(operands[-1].view.ptr, views, calling_stream)
        for array in (*arrays, out):
            if isinstance(array, DeviceArray):
                array.record_use(calling_stream)
        if isinstance(out, DeviceArray):
            out.stream = calling_stream
        return out
    result = counter.count(views, calling_stream)
    return result if separately else sum(result)


class LossScaler:
    """Scales a loss so that small gradients do not underflow in float16, and adapts the scale.

    Multiply the loss by ``scale``, divide the gradients by it, and call ``update`` with the number of their
    non-finite elements: it returns whether the optimizer may apply the gradients. The defaults are those of
    torch.amp.GradScaler. With torch, use that class, which divides and checks all gradients together.

    >>> scaler = cudakit.LossScaler()
    >>> gradients = cudakit.to_device([1.0, float("inf")], "sim")
    >>> scaler.update(cudakit.count_nonfinite(gradients))
    False
    >>> scaler.scale
    32768.0
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not (
            scale > 0 and growth_factor >= 1 and 0 < backoff_factor < 1 and growth_interval > 0
        ):
            raise UsageError(
                f"a loss scaler with scale {scale}, growth {growth_factor}, backoff {backoff_factor}, "
                f"interval {growth_interval}",
                hint="the scale is positive, growth at least 1, backoff between 0 and 1",
            )
        self.scale = scale  # Factor of the loss.
        self.finite_steps = 0  # Number of steps with finite gradients since the scale changed.
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval

    def update(self, found_nonfinite: int | bool) -> bool:
        """Adapt the scale to the gradients of a step; return whether the gradients may be applied.

        >>> scaler = cudakit.LossScaler(1024.0, growth_interval=2)
        >>> [scaler.update(count) for count in (0, 0, 3)], scaler.scale
        ([True, True, False], 1024.0)
        """
        self.finite_steps = 0 if found_nonfinite else self.finite_steps + 1
        if found_nonfinite:
            self.scale *= self._backoff_factor
        elif self.finite_steps == self._growth_interval:
            self.scale, self.finite_steps = self.scale * self._growth_factor, 0
        return not found_nonfinite


class _Counter:
    """The counting kernels of one device, and memory for the counts of calls that wait for the device."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._kernels = NonFiniteKernels(gpu)
        self._lock = Lock()

    def count(self, views: Sequence[ArrayView], stream: Stream) -> NonFinite:
        """Count non-finite elements on a stream, and wait for the result."""
        gpu = self.gpu
        if gpu.capture_id(stream) is not None:
            raise UsageError(
                "the stream is being captured, so that the count is not known yet",
                hint="pass out= for an array that each launch of the graph fills",
            )
        with self._lock:
            counters, host_counters = self._memory
            self.add_counts(counters, views, stream)
            gpu.copy(host_counters, counters, COUNTER_BYTES, stream)
            gpu.sync_stream(stream)
            return NonFinite(*gpu.host_view(host_counters, COUNTER_BYTES).cast("Q"))

    @cached_property
    def _memory(self) -> tuple[Ptr, Ptr]:
        """Device memory and pinned host memory for the counts of NaN and of infinite elements."""
        return self.gpu.malloc(COUNTER_BYTES), self.gpu.host_malloc(COUNTER_BYTES)

    def add_counts(self, counters: Ptr, views: Sequence[ArrayView], stream: Stream) -> None:
        """Enqueue the kernels that write the counts of NaN and of infinite elements."""
        self.gpu.fill(counters, 0, COUNTER_BYTES, stream)
        for view in views:
            if view.size:
                self._kernels.count(counters, view.ptr, view.size, view.dtype, stream)


@cache
def _counter_of(ordinal: int) -> _Counter:
    """Return the counter of non-finite elements of a real device; all calls share the counter."""
    return _Counter(shared_device(ordinal))


def _float_view(view: ArrayView, index: int) -> ArrayView:
    """Return a view of all floating-point numbers of an array, in the order of their addresses.

    Raises UsageError for a layout with gaps or repeated elements, and for a dtype that is not supported.
    """
    dtype = _PART_DTYPES.get(view.dtype, view.dtype)
    if dtype not in _FORMATS:
        if dtype == "bool" or dtype.lstrip("u").startswith("int"):
            return ArrayView(view.ptr, "float32", (0,), (4,))
        raise UsageError(
            f"array {index} has dtype {view.dtype}, whose elements cannot be counted",
            hint=f"the dtypes are {', '.join((*_FORMATS, *_PART_DTYPES))}",
        )
    item_bytes, part_count = _FORMATS[dtype].size_bytes, 2 if view.dtype in _PART_DTYPES else 1
    dense_stride = item_bytes * part_count
    for stride, extent in sorted(zip(view.strides, view.shape, strict=True)):
        if extent > 1 and stride != dense_stride and view.size:
            raise UsageError(
                f"array {index} has gaps or repeated elements: shape {view.shape}, strides {view.strides}",
                hint="pass a copy, such as array.contiguous() in torch",
            )
        dense_stride *= extent if extent > 1 else 1
    if view.ptr % item_bytes:
        raise UsageError(f"array {index} is misaligned: {dtype} at address {view.ptr:#x}")
    return ArrayView(view.ptr, dtype, (view.size * part_count,), (item_bytes,))
