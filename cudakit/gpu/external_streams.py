"""A stream of the driver, as frameworks take it."""

from __future__ import annotations

from typing import Any


class StreamHandle(int):
    """The driver's handle of a stream, which every library takes, as a number or by its protocol."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return version and handle, as cuda.core asks for them."""
        return 0, int(self)


def stream_of_cupy(cupy: Any, handle: int) -> Any:
    """Wrap a stream for CuPy, which does not own it. Of the current device.

    ExternalStream is deprecated since CuPy 14, which has Stream.from_external.
    """
    wrap = getattr(cupy.cuda.Stream, "from_external", None) or cupy.cuda.ExternalStream
    return wrap(StreamHandle(handle))
