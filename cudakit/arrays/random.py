"""Random numbers on the device: draws, the kernels that fill memory with them, and their numpy counterparts.

A draw names the kernel and the parameters of one call. It starts at a Philox block, and each element depends
only on its index, the draw and the counter, not on the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.arrays import random_values
from cudakit.arrays.launch import LoadedKernels, cuda_source
from cudakit.arrays.random_values import Counter, round_to_dtype
from cudakit.errors import UsageError
from cudakit.gpu.api import Argument, Gpu, Kernel, Ptr, Stream
from cudakit.gpu.api.arrays import BF16, Launch, decode, host_kernel

THREADS = 256  # threads of a CUDA block
FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
# Maximum number of CUDA blocks: enough to fill all GPUs. With more, each thread would write too few numbers.
_MAX_BLOCKS = 2048
# Number of draws whose parameters are cached, because programs repeat calls.
_CACHED_DRAWS = 1024
# Size of a counter in device memory: position, sequence, seed, and the number of CUDA blocks that have read
# the counter during the running launch.
COUNTER_BYTES = 32
NO_COUNTER = Ptr(0)
# Elements that the numpy counterpart computes at once: intermediate arrays stay in the CPU's cache.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Draw:
    """One call of a generator: the kernel, its parameters, and the Philox blocks that it uses."""

    kernel: str  # Name of the kernel without its prefix; names the numpy function, too.
    count: int  # Number of elements that the kernel writes.
    parameters: tuple[np.generic, ...]  # Arguments of the kernel after the counter.
    blocks: int = 0  # Number of Philox blocks that the call uses.

    @cached_property
    def storage(self) -> str:
        """The numpy dtype in which the kernel writes: bfloat16 as uint16, integers as unsigned ones."""
        method, _, element_type = self.kernel.partition("_")
        if method in ("uniform", "normal"):
            return "uint16" if element_type == "bfloat16" else element_type
        return {"bits": "u1", "wide_integers": "u8"}.get(self.kernel, f"u{element_type}")

    @cached_property
    def threads(self) -> int:
        """The number of threads that write all elements if each thread runs one iteration of its loop."""
        method, _, dtype = self.kernel.partition("_")
        if method == "uniform":
            return -(-self.count // random_values.elements_per_block(dtype))
        elements_per_thread = {"bits": 16, "wide_integers": 2, "normal_float64": 2}.get(
            self.kernel, 4
        )
        return -(-self.count // elements_per_thread)

    @property
    def cuda_blocks(self) -> int:
        """The number of CUDA blocks of the launch; 0 for a draw of 0 elements."""
        return min(-(-self.threads // THREADS), _MAX_BLOCKS)


@lru_cache(_CACHED_DRAWS)
def bits_draw(count: int, dtype: str = "uint8") -> Draw:
    """Return the draw of random bits for elements of a dtype."""
    size_bytes = count * (BF16.size_bytes if dtype == "bfloat16" else np.dtype(dtype).itemsize)
    return Draw("bits", size_bytes, (), -(-size_bytes // 16))


@lru_cache(_CACHED_DRAWS)
def uniform_draw(count: int, dtype: str, low: float, high: float) -> Draw:
    """Return the draw of uniform values in [low, high), whose bounds are rounded to the dtype.

    Raises UsageError unless the rounded bounds are finite, ``low`` is less than ``high``, and their
    difference is finite.
    """
    _check_dtype(dtype, FLOATS, "uniform")
    compute_type = _compute_type(dtype)
    rounded_low, rounded_high = (_round_bound(bound, dtype) for bound in (low, high))
    with np.errstate(over="ignore"):
        value_range = compute_type(rounded_high - rounded_low)
    if not (np.isfinite(value_range) and -np.inf < rounded_low < rounded_high < np.inf):
        raise UsageError(
            f"uniform {dtype} values in [{low}, {high}): the bounds must be finite, and low below high",
            hint="the bounds are rounded to the dtype, and their difference must not overflow",
        )
    largest_value = _next_smaller(rounded_high, dtype)
    elements_per_block = random_values.elements_per_block(dtype)
    parameters = (compute_type(rounded_low + 0.0), value_range, compute_type(largest_value))
    return Draw(f"uniform_{dtype}", count, parameters, -(-count // elements_per_block))


@lru_cache(_CACHED_DRAWS)
def normal_draw(count: int, dtype: str, mean: float, deviation: float) -> Draw:
    """Return the draw of normal values. Raises UsageError unless mean and deviation are valid."""
    _check_dtype(dtype, FLOATS, "normal")
    compute_type = _compute_type(dtype)
    with np.errstate(over="ignore"):
        # The sum turns -0.0 into 0.0, so that equal arguments give equal bits.
        parameters = (compute_type(mean + 0.0), compute_type(deviation))
    if not np.isfinite(parameters).all() or deviation < 0:
        raise UsageError(
            f"normal {dtype} values with mean {mean} and standard deviation {deviation}: both must be "
            "finite, and the deviation not negative"
        )
    elements_per_block = 2 if dtype == "float64" else 4
    return Draw(f"normal_{dtype}", count, parameters, -(-count // elements_per_block))


@lru_cache(_CACHED_DRAWS)
def integers_draw(count: int, dtype: str, low: int, high: int) -> Draw:
    """Return the draw of integers in [low, high). Raises UsageError if the dtype cannot hold them."""
    _check_dtype(dtype, INTEGERS, "integers")
    dtype_limits, item_bytes = np.iinfo(dtype), np.dtype(dtype).itemsize
    if not dtype_limits.min <= low < high <= dtype_limits.max + 1:
        raise UsageError(
            f"{dtype} integers in [{low}, {high}): low must be below high, and {dtype} holds "
            f"{dtype_limits.min} to {dtype_limits.max}"
        )
    value_count, low_word = high - low, np.uint64(low % (1 << 64))
    if value_count <= 1 << 32:
        word_parameters = (low_word, np.uint64(value_count), np.uint32((1 << 32) % value_count))
        blocks = -(-count // random_values.WORDS_PER_BLOCK)
        return Draw(f"integers_{item_bytes}", count, word_parameters, blocks)
    parameters = (low_word, np.uint64(value_count % (1 << 64)), np.uint64((1 << 64) % value_count))
    return Draw("wide_integers", count, parameters, -(-count // 2))


@lru_cache(_CACHED_DRAWS)
def permutation_draw(size: int, dtype: str) -> Draw:
    """Return the draw of a permutation of 0 to ``size`` - 1. Raises UsageError if the dtype is too small."""
    _check_dtype(dtype, INTEGERS, "permutation")
    dtype_limits, item_bytes = np.iinfo(dtype), np.dtype(dtype).itemsize
    if size > dtype_limits.max + 1:
        raise UsageError(f"a permutation of {size} numbers does not fit in {dtype}")
    left_bits, right_bits = random_values.domain_bits(size)
    parameters = (np.uint64(size), np.int32(left_bits), np.int32(right_bits))
    blocks = random_values.PERMUTATION_BLOCKS if size else 0
    return Draw(f"permutation_{item_bytes}", size, parameters, blocks)


# --- CUDA C++ of the random kernels; random_values computes the same numbers and cites the algorithms ---


def _table(name: str, coefficients: Sequence[float], *, is_fp64: bool) -> str:
    """Return a constant array of exact hexadecimal literals."""
    numbers = coefficients if is_fp64 else [float(np.float32(value)) for value in coefficients]
    literals = ", ".join(value.hex() + ("" if is_fp64 else "f") for value in numbers)
    element_type = "double" if is_fp64 else "float"
    return f"__device__ constexpr {element_type} {name}[{len(numbers)}] = {{{literals}}};\n"


_TABLES = "".join(
    _table(name, coefficients, is_fp64=name.endswith("64"))
    for name, coefficients in {
        "LOG_FP32": random_values.LOG_FP32,
        "SIN_FP32": random_values.SIN_FP32,
        "COS_FP32": random_values.COS_FP32,
        "LN2_FP32": (random_values.LN2_HIGH, random_values.LN2_LOW),
        "RADIANS_FP32": (random_values.RADIANS_FP32,),
        "LOG_P_FP64": random_values.LOG_P_FP64,
        "LOG_Q_FP64": random_values.LOG_Q_FP64,
        "SIN_FP64": random_values.SIN_FP64,
        "COS_FP64": random_values.COS_FP64,
        "LN2_FP64": (random_values.LN2_HIGH, random_values.LN2_LOW),
        "RADIANS_FP64": (random_values.RADIANS_FP64,),
    }.items()
)

# Parameters of all kernels that write numbers. The simulated device reads their sizes from the source.
# Kernels of STORED_COUNTER_SOURCE start at the counter at the address `stored`, and add `draw_blocks` to its
# position. Kernels of SOURCE start at `position`, `sequence` and `seed`.
_FILL_PARAMETERS = (
    "u64 count, u64 position, u64 sequence, u64 seed, StoredCounter* stored, u64 draw_blocks"
)

# (name of the dtype, type of the elements, type of the arithmetic, elements per block of uniform and normal)
_FLOATS = (
    ("float64", "double", "double", 2, 2),
    ("float32", "float", "float", 4, 4),
    ("float16", "fp16", "float", 8, 4),
    ("bfloat16", "bf16", "float", 8, 4),
)


def _float_kernels(
    name: str,
    element: str,
    compute_type: str,
    uniforms_per_block: int,
    normals_per_block: int,
) -> str:
    return f"""
extern "C" __global__ void cudakit_random_uniform_{name}(
    {element}* out, {_FILL_PARAMETERS}, {compute_type} low, {compute_type} span, {compute_type} largest) {{
    fill_uniform<{element}, {compute_type}, {uniforms_per_block}>(out, count, START, low, span, largest);
}}
extern "C" __global__ void cudakit_random_normal_{name}(
    {element}* out, {_FILL_PARAMETERS}, {compute_type} mean, {compute_type} deviation) {{
    fill_normal<{element}, {compute_type}, {normals_per_block}>(out, count, START, mean, deviation);
}}
"""


def _integer_kernels(item_bytes: int) -> str:
    element = f"u{8 * item_bytes}"
    return f"""
extern "C" __global__ void cudakit_random_integers_{item_bytes}(
    {element}* out, {_FILL_PARAMETERS}, u64 low, u64 span, u32 limit) {{
    fill_integers<{element}>(out, count, START, low, span, limit);
}}
extern "C" __global__ void cudakit_random_permutation_{item_bytes}(
    {element}* out, {_FILL_PARAMETERS}, u64 size, int left_bits, int right_bits) {{
    fill_permutation<{element}>(out, count, START, size, left_bits, right_bits);
}}
"""


SOURCE = "".join(
    (
        cuda_source("philox.cuh"),
        f"#define WARP 32\n#define THREADS {THREADS}\n",
        f"#define ATTEMPT_SHIFT {random_values.ATTEMPT_SHIFT}\n",
        f"#define ROUNDS {random_values.ROUNDS}\n",
        f"#define PERMUTATION_BLOCKS {random_values.PERMUTATION_BLOCKS}\n",
        f"#define SQRT_HALF_FP32 {random_values.SQRT_HALF_FP32:#x}\n",
        f"#define SQRT_HALF_FP64 {random_values.SQRT_HALF_FP64:#x}LL\n",
        _TABLES,
        cuda_source("random.cu").replace("FILL_PARAMETERS", _FILL_PARAMETERS),
        *(_float_kernels(*row) for row in _FLOATS),
        *(_integer_kernels(item_bytes) for item_bytes in (1, 2, 4, 8)),
    )
)

# The same kernels with the counter in device memory. One kernel with a choice between both places would be
# slower (4 to 8 % on an H200), because the compiler keeps only parameters in uniform registers.
STORED_COUNTER_SOURCE = f"// source: random in CUDA graphs\n#define STORED_COUNTER\n{SOURCE}"


# --- Launches ---------------------------------------------------------------------------------------


class RandomKernels:
    """The random kernels of one device, loaded at their first use, also during a stream capture."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def fill(
        self,
        destination: Ptr,
        draw: Draw,
        start: Counter,
        stream: Stream,
        stored_counter: Ptr = NO_COUNTER,
    ) -> None:
        """Enqueue the kernel of a draw from block ``start``. A draw of 0 elements launches nothing.

        With the address of a ``stored_counter``, the kernel starts there instead, and advances it.
        """
        words = map(np.uint64, (draw.count, start.position, start.sequence, start.seed))
        args: list[Argument] = [destination, *words, stored_counter, np.uint64(draw.blocks)]
        args += draw.parameters
        if draw.cuda_blocks:
            kernels = self._stored_kernels if stored_counter else self._kernels
            grid, block = draw.cuda_blocks, THREADS
            kernels.launch(f"cudakit_random_{draw.kernel}", args, stream, grid=grid, block=block)

    def store_counter(self, address: Ptr, counter: Counter, stream: Stream) -> None:
        """Enqueue a kernel that writes a counter of COUNTER_BYTES bytes to device memory."""
        words = map(np.uint64, (counter.position, counter.sequence, counter.seed))
        self._kernels.launch("cudakit_random_store_counter", (address, *words), stream)

    def kernel(self, draw: Draw, *, has_stored_counter: bool) -> Kernel:
        """Return the loaded kernel of a draw that starts at an argument, or at a stored counter."""
        kernels = self._stored_kernels if has_stored_counter else self._kernels
        return kernels.kernel(f"cudakit_random_{draw.kernel}")

    @cached_property
    def _kernels(self) -> LoadedKernels:
        with self.gpu.relaxed():
            return LoadedKernels(self.gpu, SOURCE, _NAMES)

    @cached_property
    def _stored_kernels(self) -> LoadedKernels:
        """The kernels that read the counter from device memory."""
        with self.gpu.relaxed():
            return LoadedKernels(self.gpu, STORED_COUNTER_SOURCE, _NAMES)

    def close(self) -> None:
        """Unload the kernels, all of which must have finished."""
        for name in ("_kernels", "_stored_kernels"):
            if kernels := self.__dict__.pop(name, None):
                kernels.close()


def fill_on_host(destination: npt.NDArray[Any], draw: Draw, start_counter: Counter) -> None:
    """Write the numbers that ``RandomKernels.fill`` writes to a flat array of the storage dtype."""
    compute_values = _FUNCTIONS[draw.kernel]
    for first_index in range(0, draw.count, _CHUNK):
        element_count = min(_CHUNK, draw.count - first_index)
        destination[first_index : first_index + element_count] = compute_values(
            first_index, element_count, start_counter, *draw.parameters
        )


def _check_dtype(dtype: str, allowed_dtypes: tuple[str, ...], method: str) -> None:
    """Raise UsageError unless a method of a generator can fill arrays of a dtype."""
    if dtype not in allowed_dtypes:
        raise UsageError(
            f"{method} cannot give {dtype}", hint=f"use one of {', '.join(allowed_dtypes)}"
        )


def _compute_type(dtype: str) -> type[np.float64] | type[np.float32]:
    """Return the type in which values of a dtype are computed before they are rounded."""
    return np.float64 if dtype == "float64" else np.float32


def _round_bound(value: float, dtype: str) -> float:
    """Return a number rounded to a dtype."""
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return float(np.dtype(dtype).type(value))
        fp32_value = np.array([value], np.float32)
    return float(decode(round_to_dtype(fp32_value, dtype), BF16)[0])


def _next_smaller(value: float, dtype: str) -> float:
    """Return the largest number of a dtype below a finite number of the dtype."""
    if dtype != "bfloat16":
        scalar = np.dtype(dtype).type
        return float(np.nextafter(scalar(value), scalar(-np.inf)))
    # Adjacent bfloat16 numbers differ by 1 in the upper 16 bits of fp32.
    bfloat16_bits = int(np.float32(value).view(np.uint32)) >> 16
    if bfloat16_bits in (0, 0x8000):
        smaller_bits = 0x8001
    else:
        smaller_bits = bfloat16_bits + (1 if bfloat16_bits > 0x8000 else -1)
    return float(np.array([smaller_bits << 16], np.uint32).view(np.float32)[0])


# The numpy function of each kernel, by the name of the kernel without its prefix.
_FUNCTIONS: dict[str, Callable[..., npt.NDArray[Any]]] = {
    "bits": random_values.bits,
    "wide_integers": random_values.wide_integers,
    **{f"uniform_{dtype}": partial(random_values.uniform, dtype) for dtype in FLOATS},
    **{f"normal_{dtype}": partial(random_values.normal, dtype) for dtype in FLOATS},
    **{f"integers_{item_bytes}": random_values.integers for item_bytes in (1, 2, 4, 8)},
    **{f"permutation_{item_bytes}": random_values.permutation for item_bytes in (1, 2, 4, 8)},
}


_NAMES = tuple(f"cudakit_random_{name}" for name in (*_FUNCTIONS, "store_counter"))


def _register_host_kernel(name: str) -> None:
    """Register the host kernel of a random kernel for simulated devices."""

    @host_kernel(f"cudakit_random_{name}")
    def fill(
        launch: Launch,
        destination: Ptr,
        count: np.uint64,
        position: np.uint64,
        sequence: np.uint64,
        seed: np.uint64,
        stored_counter: Ptr,
        draw_blocks: np.uint64,
        *parameters: np.generic,
    ) -> None:
        draw = Draw(name, int(count), parameters)
        counter_words: Iterable[Any] = (position, sequence, seed)
        if stored_counter:
            stored_words = launch.update(stored_counter, "uint64", 3)
            counter_words = tuple(stored_words)
            stored_words[0] += draw_blocks
        output_array = launch.write(destination, draw.storage, draw.count)
        fill_on_host(output_array, draw, Counter(*map(int, counter_words)))


for _name in _FUNCTIONS:
    _register_host_kernel(_name)


@host_kernel("cudakit_random_store_counter")
def _store_counter(launch: Launch, address: Ptr, *words: np.uint64) -> None:
    launch.write(address, "uint64", 4)[:] = (*words, 0)
