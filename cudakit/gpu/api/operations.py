"""The protocol of libraries that compute the operations of ``cudakit bench ops`` on arrays of float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.api.values import Stream

Operation: TypeAlias = Literal["add", "matmul", "softmax", "sum"]
# add: x + y. matmul: x @ y of two matrices. softmax: over the last axis of x. sum: of all elements of x.
OPERATIONS: tuple[Operation, ...] = ("add", "matmul", "softmax", "sum")

ArrayLibraryName: TypeAlias = Literal["torch", "cupy"]
ARRAY_LIBRARIES: tuple[ArrayLibraryName, ...] = ("torch", "cupy")


class OperationLibrary(Protocol):
    """A library that computes operations on memory that the caller allocated."""

    @property
    def name(self) -> str:
        """Name of the library: "torch"."""

    @property
    def version(self) -> str:
        """Version of the library: "2.11.0"."""

    def describe(self, operation: Operation) -> str:
        """Return the call that computes an operation: "torch.add(x, y, out=z)"."""

    def bind(
        self, operation: Operation, inputs: Sequence[ArrayView], output: ArrayView
    ) -> Callable[[], object]:
        """Return a function that enqueues an operation on the stream of ``set_stream``.

        The views are C-contiguous arrays of float32. Raises Unsupported if the library lacks the operation.
        """

    def set_stream(self, stream: Stream) -> None:
        """Choose the stream of later calls, until ``close`` restores the previous stream of the library."""

    def close(self) -> None:
        """Release the arrays on the caller's memory, and restore the library's stream."""
