"""The methods ``allocate`` and ``deallocate`` of a cuda.core memory resource, in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuda.core import Buffer  # type: ignore[import-untyped]

from cudakit.errors import CudakitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuda.core import Stream


_from_handle = Buffer.from_handle


class Calls:
    """The two methods of a memory resource. ``_alloc`` and ``_free`` are functions of its allocator.

    ``_buffers.c`` implements the same class in C. It handles calls with the arguments that cuda.core passes,
    and leaves other calls to this class.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        _alloc: Callable[[int, int], int]
        _free: Callable[..., None]

    def allocate(self, size: int, *, stream: Stream) -> Buffer:
        """Allocate a Buffer of ``size`` bytes in stream order. Raises OutOfMemory."""
        ptr = self._alloc(size, stream.__cuda_stream__()[1])
        try:
            return _from_handle(ptr, size, self, stream=stream)
        except BaseException:
            self._free(ptr)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Stream) -> None:  # noqa: ARG002
        """Free memory in stream order. Raises nothing: a double free is counted in ``invalid_frees``."""
        try:  # noqa: SIM105  suppress() is slower than the free itself
            self._free(ptr, stream.__cuda_stream__()[1])
        except CudakitError:
            pass
