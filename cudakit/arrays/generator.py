"""``cudakit.Generator``: random numbers on the device, bit by bit the same in numpy."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import cache, partial
from operator import index
from threading import Lock
from typing import Any

import numpy as np

from cudakit.arrays.kernels import open_device
from cudakit.arrays.random import (
    RandomKernels,
    bits_draw,
    integers_draw,
    normal_draw,
    permutation_draw,
    uniform_draw,
)
from cudakit.arrays.random_arrays import (
    DeviceFiller,
    DrawRequest,
    GeneratorCounter,
    HostFiller,
    Shape,
    advance_counter,
)
from cudakit.arrays.random_values import ATTEMPT_SHIFT, Counter, philox
from cudakit.errors import InputError, UsageError
from cudakit.gpu.api import Gpu

_STATE_VERSION = 1
_ALGORITHM = "philox4x32-10"
# Exclusive upper limit of each number in the state of a generator.
_STATE_LIMITS = {
    "seed": 1 << 64,
    "sequence": 1 << ATTEMPT_SHIFT,
    "position": 1 << 64,
    "spawned": 1 << 63,
}
# High bits of the sequence numbers from which seeds of spawned generators are drawn. The rejection sampling
# of integers never uses sequence numbers this high.
_SPAWN_SEQUENCE = 0xFFFF << ATTEMPT_SHIFT


class Generator:
    """Generates random numbers by Philox 4x32-10, in new arrays or in arrays of any library.

    ``seed`` is an integer below 2^64; None takes one from the operating system. ``device`` is a CUDA device
    index (the current device by default), ``"sim"`` or ``"sim:MODEL"`` for a simulated device, a device that
    cudakit opened, or ``"numpy"``, which computes the same numbers on the host. ``sequence``, below 2^48,
    selects one of the independent sequences of a seed.

    Each call begins at the next Philox block of 128 bits and uses whole blocks. Its numbers depend on the
    seed, the sequence and the position only: not on the device, the launch, the stream or the alignment of
    the array. Several calls give the numbers of one longer call if all but the last one draw a multiple of 8
    values; a permutation cannot be divided.

    Each method takes a shape for a new array (a ``DeviceArray``), or ``out``: a contiguous array in device
    memory of torch, CuPy, Numba or another library, or of numpy with ``device="numpy"``. ``stream`` is a
    stream of any library; by default it is the current stream of torch or CuPy if ``out`` is theirs, else
    that of ``cudakit.stream``. A call enqueues one kernel, does not wait for it, and returns the array.

    A CUDA graph can capture calls with ``out``. Each replay then gives new numbers: it continues at the
    position that the calls and replays before it reached. From the first capture on, the position is in
    device memory, calls and replays must be ordered by streams or events, and ``position``, ``state``,
    ``restore``, ``advance`` and ``jump`` wait for the device and must not be called during a capture.

    Raises UsageError for invalid arguments. Several threads can use one generator.

    >>> generator = cudakit.Generator(42, device="sim")
    >>> generator.integers(0, 10, 5).copy_to_host().tolist()
    [6, 4, 0, 3, 9]
    >>> cudakit.Generator(42, device="numpy").integers(0, 10, 5).tolist()
    [6, 4, 0, 3, 9]
    """

    def __init__(
        self,
        seed: int | None = None,
        *,
        device: int | str | Gpu | None = None,
        sequence: int = 0,
    ) -> None:
        seed_number = (
            secrets.randbits(64) if seed is None else _check_state_number("seed", seed, UsageError)
        )
        start = Counter(0, _check_state_number("sequence", sequence, UsageError), seed_number)
        self._counter = GeneratorCounter(start)
        self._spawned_count = 0
        self._lock = Lock()  # protects the number of spawned generators
        self._filler: DeviceFiller | HostFiller
        if isinstance(device, str) and device == "numpy":
            self._filler = HostFiller(self._counter)
            return
        if device is None:
            from cudakit.gpu.cuda.current import current_device

            device = current_device()
        self._filler = DeviceFiller(
            _shared_kernels(device) if isinstance(device, int | str) else RandomKernels(device),
            self._counter,
        )

    @property
    def seed(self) -> int:
        """The seed, which is the key of Philox."""
        return self._counter.seed_and_sequence()[0]

    @property
    def sequence(self) -> int:
        """The sequence number, which is the high half of the counter of Philox."""
        return self._counter.seed_and_sequence()[1]

    @property
    def position(self) -> int:
        """The number of the next block of Philox: the low half of the 128-bit counter of Philox.

        After a CUDA graph captured a call, the position is in device memory, and the property waits for the
        device.
        """
        return self._counter.read().position

    def bits(
        self,
        shape: Shape | None = None,
        *,
        dtype: object = None,
        out: Any = None,
        stream: object = None,
    ) -> Any:
        """Return random bits in an array of integers, uint32 by default; ``out`` may have any dtype.

        The 32-bit words are those of cuRAND's Philox4_32_10 generator with this seed, ``subsequence`` equal
        to the sequence number, and ``offset`` equal to 4 times the position.

        >>> cudakit.Generator(42, device="numpy").bits(2).tolist()
        [2632642643, 2012563771]
        """
        name = None if dtype is None else _dtype_name(dtype)
        if (
            out is None
            and name is not None
            and (name == "bfloat16" or np.dtype(name).kind not in "iu")
        ):
            raise UsageError(f"bits in a new array need an integer dtype, not {name}")
        request = DrawRequest("uint32", name, (), bits_draw)
        return self._filler.fill(request, shape, out, stream)

    def uniform(
        self,
        shape: Shape | None = None,
        *,
        low: float = 0.0,
        high: float = 1.0,
        dtype: object = None,
        out: Any = None,
        stream: object = None,
    ) -> Any:
        """Return uniform values in [low, high): float32 by default, float64, float16 or bfloat16.

        In [0, 1) they are multiples of 2^-24 (float64: 2^-53, float16: 2^-11, bfloat16: 2^-8). The bounds are
        rounded to the dtype.

        >>> values = cudakit.Generator(1, device="numpy").uniform(1000, low=-1, high=1)
        >>> bool(values.min() >= -1 and values.max() < 1)
        True
        """
        name = None if dtype is None else _dtype_name(dtype)
        bounds = _convert_argument("low", low, float), _convert_argument("high", high, float)
        return self._filler.fill(
            DrawRequest("float32", name, bounds, uniform_draw), shape, out, stream
        )

    def normal(
        self,
        shape: Shape | None = None,
        *,
        mean: float = 0.0,
        std: float = 1.0,
        dtype: object = None,
        out: Any = None,
        stream: object = None,
    ) -> Any:
        """Return normal values: float32 by default, float64, float16 or bfloat16.

        The transform of Box and Muller is computed in fp32 (float64: in fp64), and rounded to the dtype.

        >>> values = cudakit.Generator(42, device="numpy").normal(100_000, mean=5.0, std=2.0)
        >>> round(float(values.mean()), 1), round(float(values.std()), 1)
        (5.0, 2.0)
        """
        name = None if dtype is None else _dtype_name(dtype)
        mean_and_std = _convert_argument("mean", mean, float), _convert_argument("std", std, float)
        return self._filler.fill(
            DrawRequest("float32", name, mean_and_std, normal_draw), shape, out, stream
        )

    def integers(
        self,
        low: int,
        high: int,
        shape: Shape | None = None,
        *,
        dtype: object = None,
        out: Any = None,
        stream: object = None,
    ) -> Any:
        """Return integers in [low, high), int64 by default; each one is exactly equally likely.

        >>> cudakit.Generator(42, device="numpy").integers(1, 7, 8).tolist()
        [4, 3, 1, 3, 6, 2, 4, 3]
        """
        name = None if dtype is None else _dtype_name(dtype)
        bounds = _convert_argument("low", low, index), _convert_argument("high", high, index)
        return self._filler.fill(
            DrawRequest("int64", name, bounds, integers_draw), shape, out, stream
        )

    def permutation(
        self,
        count: int,
        *,
        dtype: object = None,
        out: Any = None,
        stream: object = None,
    ) -> Any:
        """Return the numbers 0 to ``count`` - 1 in random order, int64 by default.

        A keyed bijection computes each element from its index, without sorting. Orders are equally likely as
        far as statistical tests can tell.

        >>> sorted(cudakit.Generator(1, device="numpy").permutation(5).tolist())
        [0, 1, 2, 3, 4]
        """
        name = None if dtype is None else _dtype_name(dtype)
        request = DrawRequest("int64", name, (), permutation_draw)
        return self._filler.fill(request, count, out, stream)

    def state(self) -> dict[str, int | str]:
        """Return the state of the generator as a dictionary of numbers and strings, which JSON can store.

        >>> cudakit.Generator(42, device="numpy").state()["position"]
        0
        """
        with self._lock:
            spawned_count = self._spawned_count
        position, sequence, seed = self._counter.read()
        return {
            "version": _STATE_VERSION,
            "algorithm": _ALGORITHM,
            "seed": seed,
            "sequence": sequence,
            "position": position,
            "spawned": spawned_count,
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from the state of a generator on any device. Raises InputError if the state is invalid.

        >>> generator = cudakit.Generator(1, device="numpy")
        >>> state = generator.state()
        >>> first = generator.uniform(3)
        >>> generator.restore(state)
        >>> bool((generator.uniform(3) == first).all())
        True
        """
        version, algorithm = state.get("version"), state.get("algorithm")
        if version != _STATE_VERSION or algorithm != _ALGORITHM:
            raise InputError(
                f"a generator's state of version {version} and algorithm {algorithm}",
                hint=f"version {_STATE_VERSION} of {_ALGORITHM} is supported",
            )
        state_numbers = {
            name: _check_state_number(name, state.get(name), InputError) for name in _STATE_LIMITS
        }
        counter = Counter(
            state_numbers["position"], state_numbers["sequence"], state_numbers["seed"]
        )
        self._counter.change(lambda _: counter)
        with self._lock:
            self._spawned_count = state_numbers["spawned"]

    def advance(self, blocks: int) -> None:
        """Skip ``blocks`` Philox blocks, each of 4 words, or go back if negative.

        Raises UsageError if the sequence has no such block.

        >>> generator = cudakit.Generator(42, device="numpy")
        >>> generator.advance(3)
        >>> generator.position
        3
        """
        self._counter.change(partial(advance_counter, blocks))

    def jump(self, count: int = 1) -> None:
        """Skip ``count`` sequences of 2^64 Philox blocks, backwards if negative; keep the position.

        Raises UsageError if the seed has no such sequence.

        >>> generator = cudakit.Generator(42, device="numpy")
        >>> generator.jump()
        >>> generator
        Generator(seed=42, sequence=1, position=0)
        """

        def add_sequences(counter: Counter) -> Counter:
            sequence = _check_state_number("sequence", counter.sequence + count, UsageError)
            return counter._replace(sequence=sequence)

        self._counter.change(add_sequences)

    def spawn(self, count: int) -> list[Generator]:
        """Return new generators on the same device, with seeds that derive from this generator.

        Each new seed depends on the seed and the sequence of this generator, and on the number of generators
        that it spawned before, but not on its position.

        >>> first, second = cudakit.Generator(1, device="numpy").spawn(2)
        >>> first.seed != second.seed
        True
        """
        with self._lock:
            first_block = self._spawned_count
            self._spawned_count += count
        seed, sequence = self._counter.seed_and_sequence()
        words = philox(first_block, count, _SPAWN_SEQUENCE | sequence, seed).view(np.uint64)
        children = [Generator(int(child_seed), device="numpy") for child_seed in words[:, 0]]
        for child in children:
            child._filler = self._filler.for_counter(child._counter)
        return children

    def __repr__(self) -> str:
        seed, sequence = self._counter.seed_and_sequence()
        # A counter in device memory is not read, because the read would wait for the device.
        position = (
            "on the device" if self._counter.device_counter else self._counter.read().position
        )
        return f"Generator(seed={seed}, sequence={sequence}, position={position})"


@cache
def _shared_kernels(device: int | str) -> RandomKernels:
    """Return the kernels of a device, which all generators of the process share."""
    try:
        return RandomKernels(open_device(device))
    except UsageError as error:
        error.hint += "; numpy computes on the host"
        raise


def _check_state_number(name: str, value: object, error: Callable[[str], Exception]) -> int:
    """Return a number of a generator's state. Raises ``error`` unless the number is in its range."""
    limit = _STATE_LIMITS[name]
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < limit:
        bits = limit.bit_length() - 1
        raise error(f"the {name} must be an integer from 0 to 2^{bits} - 1, not {value!r}")
    return int(value)


def _convert_argument(name: str, value: object, convert: Callable[[Any], Any]) -> Any:
    """Return an argument as a number. Raises UsageError with the argument's name if it is not a number."""
    try:
        return convert(value)
    except (TypeError, ValueError):
        expected_type = "an integer" if convert is index else "a number"
        raise UsageError(f"{name} must be {expected_type}, not {value!r:.60}") from None


def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of numpy, torch or another library, or of a string."""
    name = str(dtype).removeprefix("torch.")
    if name == "bfloat16":
        return name
    try:
        return str(np.dtype(dtype if name == str(dtype) else name).name)
    except TypeError:
        raise UsageError(f"not a dtype: {dtype!r}", hint='pass a name such as "float32"') from None
