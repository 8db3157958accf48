"""Memory of another process, as an object that is done with it at its end."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from cudakit.core.allocator.neighbours import Neighbours, Opening
from cudakit.core.allocator.shared import SharedMemory
from cudakit.errors import UsageError
from cudakit.gpu.api import Ptr


class OpenedMemory:
    """Memory of another process, until ``close``, the end of a with block, or the end of this object.

    ``open_shared`` of an allocator makes it; ``size_bytes`` is what was shared, from ``ptr`` on. Whoever
    takes it by ``__cuda_array_interface__``, as ``cupy.asarray`` does, has it as bytes, and keeps it.
    """

    def __init__(
        self, opening: Opening, shared: SharedMemory, neighbours: Neighbours, owner: object
    ) -> None:
        self.size_bytes = shared.size_bytes
        self._offset_bytes = shared.offset_bytes
        self._opening: Opening | None = opening
        self._neighbours = neighbours
        self._owner = owner  # its device must not be closed before

    @property
    def ptr(self) -> Ptr:
        """The address in this process. Raises UsageError after ``close``."""
        if self._opening is None:
            raise UsageError("this memory of another process was closed", hint="open it again")
        return Ptr(self._opening.ptr + self._offset_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.ptr, False),
            "strides": None,
            "stream": None,  # none that this process would know
            "version": 3,
        }

    def close(self) -> None:
        """Be done with it: it is unmapped when all who have opened it here are. A second time does nothing.

        Waits for the device; while the allocator is in a capture that is left to a later call. Raises
        CudaError where the driver refuses, which is tried again later.
        """
        if self._opening is not None:
            self._opening = None
            self._neighbours.close_unused()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
