"""The two calls of cuda.core's Buffers, in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuda.core import Buffer  # type: ignore[import-untyped]

from cudakit.errors import CudakitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuda.core import Stream


_from_handle = Buffer.from_handle


class Calls:
    """The calls of a memory resource; ``_alloc`` and ``_free`` are those of its allocator.

    ``_buffers.c`` has the same class for calls in the form that cuda.core uses; it calls this one for all
    other forms.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        _alloc: Callable[[int, int], int]
        _free: Callable[..., None]

    def allocate(self, size: int, *, stream: Stream) -> Buffer:
        """Allocate a Buffer of so many bytes for use in the order of a stream. Raises OutOfMemory."""
        ptr = self._alloc(size, stream.__cuda_stream__()[1])
        try:
            return _from_handle(ptr, size, self, stream=stream)
        except BaseException:
            self._free(ptr)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Stream) -> None:  # noqa: ARG002
        """Give memory back. Never raises: what is not allocated is counted among the invalid frees."""
        try:  # noqa: SIM105  suppress() takes longer than all of the rest
            self._free(ptr, stream.__cuda_stream__()[1])
        except CudakitError:
            pass
