"""A library with and without races inside, to be installed in a directory site-packages. It uses cudakit."""

from contextlib import contextmanager

SIZE = 1 << 12


class Library:
    """Races on a simulated device, in every way in which a program can call a library."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.side = gpu.stream()
        self.workers = []

    def scale(self, memory, stream):
        """Work on a stream of the caller."""
        self.gpu.fill(memory, 1, SIZE, stream)

    def forget_fork(self, memory, stream):
        """WRONG: the side stream does not wait for the stream of the caller."""
        self.gpu.fill(memory, 1, SIZE, stream)
        self.gpu.fill(memory, 2, SIZE, self.side)
        self.join(self.side, stream)

    def join(self, first, second):
        event = self.gpu.event()
        self.gpu.record(event, first)
        self.gpu.wait(second, event)

    def forget_join(self, memory, stream):
        """WRONG: the stream of the caller writes before the side stream has finished."""
        self.join(stream, self.side)
        self.gpu.fill(memory, 2, SIZE, self.side)
        self.gpu.fill(memory, 1, SIZE, stream)
        self.join(self.side, stream)

    def nested(self, memory, stream):
        self.forget_fork(memory, stream)

    def in_loop(self, memory, streams):
        """WRONG: streams of the caller write the same memory in one call."""
        for stream in streams:
            self.scale(memory, stream)

    def with_callback(self, memory, stream, callback):
        self.gpu.fill(memory, 1, SIZE, stream)
        callback()
        self.gpu.fill(memory, 2, SIZE, self.side)
        self.join(self.side, stream)

    def batches(self, memory, stream, count):
        for _ in range(count):
            self.forget_fork(memory, stream)
            yield memory

    @contextmanager
    def scope(self, memory, stream):
        self.scale(memory, stream)
        yield

    def start(self, memory):
        """Begin work on a stream of the library: the caller has to wait for it."""
        self.gpu.fill(memory, 1, SIZE, self.side)
        return self.side

    def make_stream(self):
        return self.gpu.stream()

    def use_workers(self, memory, stream):
        """Create two streams and order them after the stream of the caller, who never gets them."""
        self.workers = [self.gpu.stream() for _ in range(2)]
        for worker in self.workers:
            self.join(stream, worker)
            self.gpu.fill(memory + SIZE, 1, 4, worker)
            self.join(worker, stream)
            self.join(stream, worker)
        for worker in self.workers:
            self.join(worker, self.workers[0])
            self.join(worker, self.workers[1])

    def work_on(self, index, memory):
        """WRONG: the streams of the library are not ordered with each other."""
        self.gpu.fill(memory, index, SIZE, self.workers[index])

    def __call__(self, memory, stream):
        self.forget_fork(memory, stream)

    def __matmul__(self, pair):
        self.forget_fork(*pair)

    def __getitem__(self, pair):
        self.forget_fork(*pair)
        return pair

    async def asynchronous(self, memory, stream):
        self.forget_fork(memory, stream)
