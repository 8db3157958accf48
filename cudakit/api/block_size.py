"""The block size of an element-wise kernel: measured once, and stored in the kernel cache."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping

from cudakit.arrays.elementwise import TUNED_THREADS, Operand, element_bytes
from cudakit.arrays.launch_plan import LaunchPlan, PlannedKernels, arguments_of
from cudakit.gpu.api import Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import ArrayView, byte_range
from cudakit.gpu.compile_cache import Label, cache_key, user_cache

_ROUNDS = 7
_LAUNCHES = 10  # number of launches per round and block size
_SMALLEST_GAIN = 0.02  # minimum relative gain over the default block size
_ALIGNMENT_BYTES = 512

# A function that returns the launch plan for inputs, outputs and a block size. None stands for the default
# block size.
Planner = Callable[[Mapping[str, Operand], Mapping[str, ArrayView], int | None], LaunchPlan]


def choose_threads(
    kernels: PlannedKernels,
    gpu: Gpu,
    planner: Planner,
    *,
    inputs: Mapping[str, Operand],
    outputs: Mapping[str, ArrayView],
    updated_inputs: tuple[str, ...],
    stream: Stream,
) -> int | None:
    """Return the fastest number of threads of a block, from the kernel cache or from a measurement.

    The kernel runs on copies of the arrays that it writes, so that measuring changes no array. Returns
    None, the default block size, during a stream capture, in which nothing can be measured. Raises
    CUDA_ERROR_OUT_OF_MEMORY if the copies do not fit.
    """
    if gpu.capture_id(stream) is not None:
        return None
    plan = planner(inputs, outputs, None)
    if not plan.blocks:
        return None
    device = _device_name(gpu)
    # Grids whose numbers of blocks have equally many bits share one measured block size.
    key = cache_key("cudakit block size", device, (), f"{plan.name} {plan.blocks.bit_length()}")
    cache = user_cache(os.environ)
    stored_threads = cache.get(key) if cache else None
    if (
        stored_threads is not None
        and stored_threads.isdigit()
        and int(stored_threads) in TUNED_THREADS
    ):
        return int(stored_threads)
    copies = _Copies(gpu, stream)
    try:
        copied_outputs = {name: copies.copy(view) for name, view in outputs.items()}
        copied_inputs = {
            name: copies.copy(operand)
            if name in updated_inputs and isinstance(operand, ArrayView)
            else operand
            for name, operand in inputs.items()
        }
        threads = _measure_threads(
            kernels, gpu, planner, copied_inputs, copied_outputs, stream, plan.threads
        )
    finally:
        copies.free()
    if cache:
        cache.keep(key, str(threads).encode(), Label(plan.name, device, "measured block size"))
    return threads


def _measure_threads(
    kernels: PlannedKernels,
    gpu: Gpu,
    planner: Planner,
    inputs: Mapping[str, Operand],
    outputs: Mapping[str, ArrayView],
    stream: Stream,
    default_threads: int,
) -> int:
    """Return the block size with the shortest median time; rounds alternate between all block sizes."""
    operands = [
        operand.ptr if isinstance(operand, ArrayView) else operand
        for operand in (*inputs.values(), *outputs.values())
    ]
    plan_by_threads = {threads: planner(inputs, outputs, threads) for threads in TUNED_THREADS}
    seconds_by_threads: dict[int, list[float]] = {threads: [] for threads in plan_by_threads}
    begin, end = gpu.event(), gpu.event()
    try:
        for _ in range(_ROUNDS):
            for threads, plan in plan_by_threads.items():
                arguments = arguments_of(plan, operands)
                kernels.launch(plan, arguments, stream)  # warms up the caches
                gpu.record(begin, stream)
                for _ in range(_LAUNCHES):
                    kernels.launch(plan, arguments, stream)
                gpu.record(end, stream)
                gpu.sync_event(end)
                seconds_by_threads[threads].append(gpu.elapsed(begin, end))
    finally:
        gpu.destroy_event(begin)
        gpu.destroy_event(end)
    median_by_threads = {
        threads: statistics.median(times) for threads, times in seconds_by_threads.items()
    }
    fastest_threads = min(median_by_threads, key=lambda threads: median_by_threads[threads])
    has_gain = (
        median_by_threads[fastest_threads]
        < (1 - _SMALLEST_GAIN) * median_by_threads[default_threads]
    )
    return fastest_threads if has_gain else default_threads


class _Copies:
    """Copies of arrays with the same layout and alignment, freed together."""

    def __init__(self, gpu: Gpu, stream: Stream) -> None:
        self._gpu, self._stream = gpu, stream
        self._allocations: list[Ptr] = []

    def copy(self, view: ArrayView) -> ArrayView:
        """Copy an array, and return the view of the copy."""
        source_begin, source_end = byte_range(view, element_bytes(view))
        if source_begin == source_end:
            return view
        memory = self._gpu.malloc(source_end - source_begin + _ALIGNMENT_BYTES, self._stream)
        self._allocations.append(memory)
        copy_begin = Ptr(memory + (source_begin - memory) % _ALIGNMENT_BYTES)
        self._gpu.copy(copy_begin, Ptr(source_begin), source_end - source_begin, self._stream)
        ptr = Ptr(copy_begin + view.ptr - source_begin)
        return ArrayView(ptr, view.dtype, view.shape, view.strides, view.read_only)

    def free(self) -> None:
        """Free all copies in stream order."""
        for memory in self._allocations:
            self._gpu.free(memory, self._stream)


def _device_name(gpu: Gpu) -> str:
    """Return a name that GPUs of the same model share."""
    if gpu.simulated:
        return str(getattr(gpu, "name", "sim"))
    from cudakit.gpu.cuda.current import device_name

    return device_name(int(getattr(gpu, "ordinal", 0)))
