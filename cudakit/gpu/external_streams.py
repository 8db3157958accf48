"""Stream handles in the form that other libraries accept."""

from __future__ import annotations

from typing import Any


class StreamHandle(int):
    """A driver stream handle: an int that also implements ``__cuda_stream__`` of cuda.core."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol version and the handle (cuda.core, "Stream protocol")."""
        return 0, int(self)


def stream_of_cupy(cupy: Any, handle: int) -> Any:
    """Return a CuPy stream for a handle of the current device, without taking ownership.

    CuPy 14 replaces ExternalStream by Stream.from_external.
    """
    make_stream = getattr(cupy.cuda.Stream, "from_external", None) or cupy.cuda.ExternalStream
    return make_stream(StreamHandle(handle))
