"""A stream of the driver for frameworks."""

from __future__ import annotations

from typing import Any


class StreamHandle(int):
    """The driver's handle of a stream, as a number and by the protocol of cuda.core."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return version and handle, as cuda.core requests."""
        return 0, int(self)


def stream_of_cupy(cupy: Any, handle: int) -> Any:
    """Return CuPy's object for a stream of the current device, which it does not own.

    ExternalStream is deprecated since CuPy 14, which has Stream.from_external.
    """
    wrap = getattr(cupy.cuda.Stream, "from_external", None) or cupy.cuda.ExternalStream
    return wrap(StreamHandle(handle))
