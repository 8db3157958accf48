"""Calls of all compiled kernels: arguments by name, the device, the stream and the launch."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cudakit.arrays.elementwise import (
    TUNED_THREADS,
    ElementwiseProgram,
    Operand,
    ResultType,
    element_bytes,
)
from cudakit.arrays.launch import (
    NO_SCRATCH,
    Address,
    LaunchPlan,
    Parameter,
    PlannedKernels,
    Scalar,
    Scratch,
    arguments_of,
)
from cudakit.errors import UsageError
from cudakit.gpu.api import LEGACY, Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import ArrayView, byte_range
from cudakit.gpu.arrays import (
    DeviceOperand,
    array_allocator,
    current_stream,
    new_array,
    operand_of,
    shared_device,
)
from cudakit.gpu.compile import Label, cache_key, user_cache
from cudakit.gpu.device_array import DeviceArray, order_streams
from cudakit.gpu.fast_call import FastCall, prepare_call

if TYPE_CHECKING:
    from cudakit.gpu.cuda.device import Cuda


# Type code that native/fast_call/call.c uses for a numeric kernel parameter, by dtype.
_NUMBER_KINDS = {"float32": "f", "float64": "d", "int64": "q", "bool": "?"}
_MAX_INTEGER = 1 << 63


class KernelCall:
    """The operands of one call by name, and the device and stream of its launch."""

    def __init__(self, arguments: Mapping[str, object], stream: object) -> None:
        self.operands: dict[str, Operand] = {}
        self._arrays: dict[str, DeviceOperand] = {}
        self._device_arrays = [
            array for array in arguments.values() if isinstance(array, DeviceArray)
        ]
        for name, argument in arguments.items():
            if isinstance(argument, bool | int | float | complex | np.generic):
                if isinstance(argument, int) and not -_MAX_INTEGER <= argument < _MAX_INTEGER:
                    raise UsageError(f"{name} is {argument}, which does not fit into 64 bits")
                if isinstance(argument, np.generic) and argument.dtype.kind not in "biufc":
                    raise UsageError(f"{name} is a {argument.dtype}, not a number")
                self.operands[name] = argument
            else:
                array = self._arrays[name] = operand_of(argument, name)
                self.operands[name] = array.view
        self.gpu = self._common_device()
        self.library = next(iter(self._arrays.values())).library
        self.stream = stream_of(stream, self.gpu, self.library)
        self._is_current_stream = stream is None

    def new_array(self, dtype: str, shape: tuple[int, ...]) -> object:
        """Return an uninitialized array of the first array's library, for use on the stream."""
        return new_array(
            self.library,
            self.gpu,
            dtype,
            shape,
            self.stream,
            is_current_stream=self._is_current_stream,
        )

    def wait_for_arrays(self) -> None:
        """Make the stream wait for the work that computes the arrays on other streams."""
        for array in self._arrays.values():
            if array.stream is not None and array.stream != self.stream:
                order_streams(self.gpu, Stream(array.stream), self.stream)
        for device_array in self._device_arrays:
            device_array.record_use(self.stream)

    def set_stream(self, results: Iterable[object]) -> None:
        """Store the stream of the launch in the results that cudakit allocated."""
        for result in results:
            if isinstance(result, DeviceArray):
                result.stream = self.stream

    def run(
        self,
        fast_call: FastCall,
        kernels: KernelsByDevice,
        plan: LaunchPlan,
        views: Sequence[Operand],
        *,
        inputs: Sequence[object],
        outputs: Sequence[object],
        new_outputs: Sequence[ResultType] | None,
        results: Sequence[int],
    ) -> Any:
        """Enqueue the kernel, prepare the launch of equal calls, and return the result or a tuple of several.

        ``views`` are the operands of the plan. ``new_outputs`` are the types of outputs that each call
        allocates; None if calls pass ``out``. ``results`` are indices of inputs and outputs.
        """
        loaded = kernels.kernels_of(self.gpu)
        scratch = kernels.scratch(self.gpu, plan, self.stream)
        operands = [view.ptr if isinstance(view, ArrayView) else view for view in views]
        self.wait_for_arrays()
        loaded.launch(plan, arguments_of(plan, operands, scratch), self.stream)
        arrays = (*inputs, *outputs)
        returned = tuple(arrays[index] for index in results)
        self.set_stream(returned)
        # A captured launch has its own scratch memory.
        has_own_scratch = scratch and self.gpu.capture_id(self.stream) is not None
        # Equal calls of a real device run without Python code.
        if plan.blocks and not self.gpu.simulated and not has_own_scratch:
            layouts = [(new_output.dtype, new_output.shape) for new_output in new_outputs or ()]
            prepare_call(
                fast_call,
                cast("Cuda", self.gpu),
                loaded.kernel(plan),
                inputs=inputs,
                outputs=outputs,
                allocate=array_allocator(self.library, self.gpu, layouts) if layouts else None,
                results=results,
                parameters=[_fast_parameter(parameter) for parameter in plan.parameters],
                blocks=plan.blocks,
                threads=plan.threads,
                stream=self.stream,
                scratch=scratch,
            )
        return returned[0] if len(returned) == 1 else returned

    def _common_device(self) -> Gpu:
        """Return the device of all arrays. Raises UsageError for several devices, or without an array."""
        if not self._arrays:
            raise UsageError(
                "all arguments are numbers", hint="pass at least one array, or an array as out="
            )
        (first_name, first), *others = self._arrays.items()
        for name, array in others:
            if array.device != first.device:
                raise UsageError(
                    f"{first_name} is on {_device_name(first.device)}, {name} on "
                    f"{_device_name(array.device)}",
                    hint="copy the arrays to one device",
                )
        return shared_device(first.device) if isinstance(first.device, int) else first.device


def stream_of(stream: object, gpu: Gpu, library: str = "") -> Stream:
    """Return the stream of an argument; for None, the current stream of the library.

    Raises UsageError for objects that are no streams.
    """
    if gpu.simulated:
        return simulated_stream(stream)
    if stream is None:
        return Stream(current_stream(library, int(getattr(gpu, "ordinal", 0))))
    from cudakit.gpu.cuda.current import stream_handle

    return Stream(stream_handle(stream))


def simulated_stream(stream: object) -> Stream:
    """Return the stream of an argument; for None, the default stream."""
    if stream is None:
        return LEGACY
    if not isinstance(stream, int):
        raise UsageError(
            f"not a stream of the simulated device: {stream!r}",
            hint="pass None, or the handle of a simulated stream as an int",
        )
    return Stream(stream)


def bind_arguments(
    names: Sequence[str], arguments: Sequence[object], named_arguments: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments of a call by name, in the order of the names.

    Raises UsageError that lists the names if arguments are missing or unexpected.
    """
    bound = dict(zip(names, arguments, strict=False))
    problem = ""
    if repeated := [name for name in named_arguments if name in bound]:
        problem = f"{repeated[0]} is given twice"
    elif unexpected := [name for name in named_arguments if name not in names]:
        problem = f"there is no argument {unexpected[0]}"
    elif len(arguments) > len(names):
        problem = f"{len(arguments)} arguments are given"
    if problem:
        raise UsageError(f"{problem}; the arguments are: {', '.join(names) or 'none'}")
    bound |= named_arguments
    if missing := [name for name in names if name not in bound]:
        raise UsageError(
            f"missing arguments: {', '.join(missing)}; the arguments are: {', '.join(names)}"
        )
    return {name: bound[name] for name in names}


def bind_outputs(names: Sequence[str], out: object) -> dict[str, object]:
    """Return the arrays of ``out`` by name. Raises UsageError unless ``out`` has one array per name."""
    if out is None:
        return {}
    arrays = out if isinstance(out, tuple | list) else (out,)
    if len(arrays) != len(names):
        raise UsageError(
            f"out has {len(arrays)} arrays, the expression has {len(names)} outputs to write: "
            f"{', '.join(names) or 'none'}"
        )
    return dict(zip(names, arrays, strict=True))


class KernelsByDevice:
    """The loaded kernels and the scratch memory of one callable, for each device that it was called on."""

    def __init__(self) -> None:
        self._kernels: dict[Gpu, PlannedKernels] = {}
        self._scratch: dict[object, Ptr] = {}

    def kernels_of(self, gpu: Gpu) -> PlannedKernels:
        """Return the kernels of a device."""
        kernels = self._kernels.get(gpu)
        if kernels is None:
            kernels = self._kernels[gpu] = PlannedKernels(gpu)
        return kernels

    def scratch(self, gpu: Gpu, plan: LaunchPlan, stream: Stream) -> Ptr:
        """Return scratch memory that no other stream uses at the same time.

        Launches of one stream run in order and share the memory. A captured launch has memory of its own,
        because a graph may be replayed on any stream.
        """
        if not plan.scratch_bytes:
            return NO_SCRATCH
        key = (gpu, plan.name, plan.scratch_bytes, stream, gpu.capture_id(stream))
        if key not in self._scratch:
            self._scratch[key] = _zeroed_memory(gpu, plan.scratch_bytes)
        return self._scratch[key]


def _zeroed_memory(gpu: Gpu, size_bytes: int) -> Ptr:
    """Allocate zeroed device memory, also while another stream is captured."""
    with gpu.relaxed():
        memory = gpu.malloc(size_bytes)
        stream = gpu.stream(blocking=False)
        try:
            gpu.fill(memory, 0, size_bytes, stream)
            gpu.sync_stream(stream)
        finally:
            gpu.destroy_stream(stream)
    return memory


def _fast_parameter(parameter: Parameter) -> tuple[str, int, np.generic | None]:
    """Return a parameter of a launch plan in the form that ``prepare_call`` takes."""
    match parameter:
        case Address(operand):
            return "a", operand, None
        case Scalar(operand, dtype):
            return _NUMBER_KINDS.get(dtype.name, "q"), operand, None
        case Scratch():
            return "s", 0, None
    return "c", 0, parameter


def _device_name(device: Gpu | int) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(getattr(device, "name", device))


# --- The block size of an element-wise kernel: measured once, and stored in the kernel cache ------

_ROUNDS = 7
_LAUNCHES = 10  # number of launches per round and block size
_SMALLEST_GAIN = 0.02  # minimum relative gain over the default block size
_ALIGNMENT_BYTES = 512


def choose_threads(
    call: KernelCall,
    kernels: PlannedKernels,
    program: ElementwiseProgram,
    inputs: Mapping[str, Operand],
    outputs: Mapping[str, ArrayView],
) -> int | None:
    """Return the fastest number of threads of a block, from the kernel cache or from a measurement.

    The kernel runs on copies of the arrays that it writes, so that measuring changes no array. Returns
    None, the default block size, during a stream capture, in which nothing can be measured. Raises
    CUDA_ERROR_OUT_OF_MEMORY if the copies do not fit.
    """
    gpu, stream = call.gpu, call.stream
    if gpu.capture_id(stream) is not None:
        return None
    plan = program.plan(inputs, outputs)
    if not plan.blocks:
        return None
    if gpu.simulated:
        device = str(getattr(gpu, "name", "sim"))
    else:
        from cudakit.gpu.cuda.current import device_name

        device = device_name(int(getattr(gpu, "ordinal", 0)))
    # Grids whose numbers of blocks have equally many bits share one measured block size.
    key = cache_key("cudakit block size", device, (), f"{plan.name} {plan.blocks.bit_length()}")
    cache = user_cache(os.environ)
    stored = cache.get(key) if cache else None
    if stored is not None and stored.isdigit() and int(stored) in TUNED_THREADS:
        return int(stored)
    memory: list[Ptr] = []

    def copy(view: ArrayView) -> ArrayView:
        """Copy an array to memory of the same layout and alignment."""
        begin, end = byte_range(view, element_bytes(view))
        if begin == end:
            return view
        memory.append(gpu.malloc(end - begin + _ALIGNMENT_BYTES, stream))
        target = Ptr(memory[-1] + (begin - memory[-1]) % _ALIGNMENT_BYTES)
        gpu.copy(target, Ptr(begin), end - begin, stream)
        return replace(view, ptr=Ptr(target + view.ptr - begin))

    try:
        copied_inputs = {
            name: copy(operand)
            if name in program.program.updated_inputs and isinstance(operand, ArrayView)
            else operand
            for name, operand in inputs.items()
        }
        copied_outputs = {name: copy(view) for name, view in outputs.items()}
        operands = [
            operand.ptr if isinstance(operand, ArrayView) else operand
            for operand in (*copied_inputs.values(), *copied_outputs.values())
        ]
        plans = {
            threads: program.plan(copied_inputs, copied_outputs, threads)
            for threads in TUNED_THREADS
        }
        seconds = _measure_plans(kernels, gpu, plans, operands, stream)
    finally:
        for ptr in memory:
            gpu.free(ptr, stream)
    fastest = min(seconds, key=lambda threads: seconds[threads])
    has_gain = seconds[fastest] < (1 - _SMALLEST_GAIN) * seconds[plan.threads]
    threads = fastest if has_gain else plan.threads
    if cache:
        cache.keep(key, str(threads).encode(), Label(plan.name, device, "measured block size"))
    return threads


def _measure_plans(
    kernels: PlannedKernels,
    gpu: Gpu,
    plans: Mapping[int, LaunchPlan],
    operands: Sequence[complex | np.generic],
    stream: Stream,
) -> dict[int, float]:
    """Return the median time of each plan; rounds alternate between all plans."""
    times: dict[int, list[float]] = {threads: [] for threads in plans}
    begin, end = gpu.event(), gpu.event()
    try:
        for _ in range(_ROUNDS):
            for threads, plan in plans.items():
                arguments = arguments_of(plan, operands)
                kernels.launch(plan, arguments, stream)  # warms up the caches
                gpu.record(begin, stream)
                for _ in range(_LAUNCHES):
                    kernels.launch(plan, arguments, stream)
                gpu.record(end, stream)
                gpu.sync_event(end)
                times[threads].append(gpu.elapsed(begin, end))
    finally:
        gpu.destroy_event(begin)
        gpu.destroy_event(end)
    return {threads: statistics.median(seconds) for threads, seconds in times.items()}
