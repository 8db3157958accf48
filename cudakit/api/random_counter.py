"""The counter of a generator: its position, sequence and seed, in host memory or in device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from cudakit.arrays.random import COUNTER_BYTES, Draw, RandomKernels
from cudakit.arrays.random_values import Counter
from cudakit.gpu.api import Gpu, Ptr, Stream
from cudakit.gpu.fast_call import LaunchCounter

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
