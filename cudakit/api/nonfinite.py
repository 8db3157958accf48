"""Counts of NaN and infinite elements, and a loss scaler that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from threading import Lock
from typing import Any, Literal, NamedTuple, TypeVar, overload

from cudakit.api.kernel_calls import stream_of
from cudakit.arrays.nonfinite import COUNTER_BYTES, NonFiniteKernels
from cudakit.errors import UsageError
from cudakit.gpu.api import Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.arrays import operand_of, shared_device
from cudakit.gpu.device_array import DeviceArray, order_streams

_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
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
        _check_counters(operands[-1].view)
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


def _check_counters(view: ArrayView) -> None:
    """Raise UsageError unless an array can hold the counts of NaN and of infinite elements."""
    if (
        view.dtype not in ("int64", "uint64")
        or view.shape != (2,)
        or view.strides != (COUNTER_BYTES // 2,)
        or view.read_only
    ):
        raise UsageError(
            f"out is {view.dtype} of shape {view.shape}, not a writable array of two int64 or uint64"
        )


def _float_view(view: ArrayView, index: int) -> ArrayView:
    """Return a view of all floating-point numbers of an array, in the order of their addresses.

    Raises UsageError for a layout with gaps or repeated elements, and for a dtype that is not supported.
    """
    dtype = _PART_DTYPES.get(view.dtype, view.dtype)
    if dtype not in _ITEM_BYTES:
        if dtype == "bool" or dtype.lstrip("u").startswith("int"):
            return ArrayView(view.ptr, "float32", (0,), (4,))
        raise UsageError(
            f"array {index} has dtype {view.dtype}, whose elements cannot be counted",
            hint=f"the dtypes are {', '.join((*_ITEM_BYTES, *_PART_DTYPES))}",
        )
    item_bytes, part_count = _ITEM_BYTES[dtype], 2 if view.dtype in _PART_DTYPES else 1
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
