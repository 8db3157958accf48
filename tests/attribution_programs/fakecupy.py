"""A library with and without races inside, to be installed in a directory site-packages. It uses CuPy."""

import cupy

_streams: list[cupy.cuda.Stream] = []


def _side() -> cupy.cuda.Stream:
    if not _streams:
        _streams.append(cupy.cuda.Stream(non_blocking=True))
    return _streams[0]


def forget_fork(x: cupy.ndarray) -> cupy.ndarray:
    """WRONG: the side stream reads what the current stream writes, without a wait."""
    cupy.add(x, 1, out=x)
    with _side():
        y = x * 2
    cupy.cuda.get_current_stream().wait_event(_side().record())
    return y


def copy_and_fill(x: cupy.ndarray) -> None:
    """WRONG: a copy on one stream, a fill on another one."""
    x.data.memset_async(0, x.nbytes, cupy.cuda.get_current_stream())
    x.data.memset_async(1, x.nbytes, _side())
    cupy.cuda.get_current_stream().wait_event(_side().record())


def scale(x: cupy.ndarray) -> None:
    cupy.multiply(x, 2, out=x)


class TwoStreams:
    """A library object that creates two streams at its first use, and forgets to order them."""

    def __init__(self) -> None:
        self._made: list[cupy.cuda.Stream] = []

    def step(self, x: cupy.ndarray) -> None:
        current = cupy.cuda.get_current_stream()
        event = current.record()
        if not self._made:
            self._made = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
            for stream in self._made:
                stream.wait_event(event)
                x[:1].data.memset_async(0, 4, stream)
                current.wait_event(stream.record())
            return
        for stream in self._made[:1]:
            stream.wait_event(event)
            x.data.memset_async(0, x.nbytes, stream)

    def finish(self, x: cupy.ndarray) -> None:
        """WRONG: the second stream does not wait for the first one."""
        x.data.memset_async(1, x.nbytes, self._made[1])
        for stream in self._made:
            cupy.cuda.get_current_stream().wait_event(stream.record())
