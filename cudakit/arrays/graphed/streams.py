"""Streams for captured functions: the current streams of frameworks, or streams of a simulated device."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from cudakit.errors import UsageError
from cudakit.gpu.api import LEGACY, Stream
from cudakit.gpu.external_streams import StreamHandle, stream_of_cupy

if TYPE_CHECKING:
    from cudakit.gpu.cuda.device import Cuda


class SimulatedStreams:
    """The streams of a simulated device, which no framework uses."""

    def handle(self, stream: Stream) -> StreamHandle:
        return StreamHandle(stream)

    def stream(self, stream_argument: object) -> Stream:
        if stream_argument is None:
            return LEGACY
        if not isinstance(stream_argument, int):
            raise UsageError(
                f"not a stream of the simulated device: {stream_argument!r}",
                hint="pass None, or the handle of a simulated stream as an int",
            )
        return Stream(stream_argument)

    def as_current(self, handle: StreamHandle) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()


class FrameworkStreams:
    """The current streams of torch and CuPy, if they are imported, and of cudakit."""

    def __init__(self, gpu: Cuda, buffers: Sequence[object]) -> None:
        self._gpu = gpu
        self._library = _framework_of(buffers)
        self._pool: Any = None

    def handle(self, stream: Stream) -> StreamHandle:
        """Return the handle to pass to a captured function."""
        return StreamHandle(self._gpu.stream_address(stream))

    def stream(self, stream_argument: object) -> Stream:
        """Return the stream for an argument of any library; for None, the current stream."""
        if stream_argument is None:
            return self._gpu.streams.external_stream(self._current_stream())
        from cudakit.gpu.cuda.current import stream

        with stream(stream_argument) as handle:
            return self._gpu.streams.external_stream(handle)

    @contextmanager
    def as_current(self, handle: StreamHandle) -> Iterator[None]:
        """Make a stream current in every imported framework during a ``with`` block."""
        from cudakit.gpu.cuda import current

        with current.device(self._gpu.ordinal), current.stream(handle), ExitStack() as stack:
            self._enter_torch(handle, stack)
            self._enter_cupy(handle, stack)
            yield

    def _current_stream(self) -> int:
        from cudakit.gpu.cuda.current import current_stream

        if self._library == "torch":
            return int(sys.modules["torch"].cuda.current_stream(self._gpu.ordinal).cuda_stream)
        if self._library == "cupy":
            return int(sys.modules["cupy"].cuda.get_current_stream(self._gpu.ordinal).ptr)
        return current_stream()

    def _enter_torch(self, handle: StreamHandle, stack: ExitStack) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            stream = torch.cuda.ExternalStream(int(handle), device=self._gpu.ordinal)
            stack.enter_context(torch.cuda.stream(stream))

    def _enter_cupy(self, handle: StreamHandle, stack: ExitStack) -> None:
        """Make the stream and a private memory pool current; replays reuse the pool's addresses."""
        cupy = sys.modules.get("cupy")
        if cupy is None:
            return
        self._pool = self._pool or cupy.cuda.MemoryPool()
        stack.enter_context(stream_of_cupy(cupy, handle))
        stack.enter_context(cupy.cuda.using_allocator(self._pool.malloc))


StreamSource: TypeAlias = SimulatedStreams | FrameworkStreams


def _framework_of(buffers: Sequence[object]) -> str:
    """Return "torch" or "cupy" by the first buffer of torch or CuPy; "" if no buffer is theirs."""
    packages = (type(buffer).__module__.partition(".")[0] for buffer in buffers)
    return next((package for package in packages if package in ("torch", "cupy")), "")
