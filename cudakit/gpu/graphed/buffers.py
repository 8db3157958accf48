"""Device buffers that a captured function uses: address, size, dtype and shape."""

from __future__ import annotations

from dataclasses import dataclass

from cudakit.errors import UsageError
from cudakit.gpu.api import Ptr
from cudakit.gpu.arrays import ArrayView, describe, view_of

_HINT = "pass device arrays or addresses; bind other arguments with functools.partial or a lambda"


@dataclass(frozen=True, slots=True)
class Layout:
    """The dtype, shape and contiguity of a buffer. New contents must have the same layout."""

    dtype: str  # Name of the dtype in numpy.
    shape: tuple[int, ...]
    size_bytes: int
    dense: bool  # Whether the buffer is C-contiguous.

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}{'' if self.dense else ', strided'}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer in device memory. ``layout`` is None if only the address is known."""

    ptr: Ptr
    layout: Layout | None = None


def buffer_of(argument: object, index: int) -> Buffer:
    """Return the buffer of argument ``index``. Raises UsageError if it is not device memory."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        return Buffer(Ptr(argument))
    view = view_of(argument)
    if view is None:
        raise UsageError(f"buffer {index} is not a device buffer: {describe(argument)}", hint=_HINT)
    return Buffer(view.ptr, _layout_of(view))


def check_contents(new: Buffer, captured: Buffer, index: int) -> None:
    """Raise UsageError if the contents of ``new`` cannot be copied into the captured buffer."""
    if new.ptr == captured.ptr:
        return
    for buffer, verb in ((captured, "was captured as"), (new, "is")):
        if buffer.layout is None:
            raise UsageError(
                f"buffer {index} {verb} a plain address, whose size is unknown",
                hint="pass arrays, or fill the buffer yourself and call replay()",
            )
    if new.layout != captured.layout or (new.layout and not new.layout.dense):
        raise UsageError(
            f"buffer {index} was captured as {captured.layout}, got {new.layout}",
            hint="contents must have the same dtype and shape, and be contiguous",
        )


def _layout_of(view: ArrayView) -> Layout:
    return Layout(view.dtype, view.shape, view.size_bytes, view.is_contiguous)
