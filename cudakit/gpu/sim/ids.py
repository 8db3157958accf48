"""Numbers for what a device was asked to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from cudakit.errors import CudaError
from cudakit.gpu.explain import Status, cuda_error

_T = TypeVar("_T")


class Ids(Generic[_T]):
    """Things of one kind by their number. A number is never given twice."""

    def __init__(self, kind: str, *, first: int = 1) -> None:
        self._kind = kind
        self._next = first
        self._things: dict[int, _T] = {}

    def add(self, make: Callable[[int], _T]) -> _T:
        """Make a thing that is told its number."""
        number, self._next = self._next, self._next + 1
        made = self._things[number] = make(number)
        return made

    def __getitem__(self, number: int) -> _T:
        try:
            return self._things[number]
        except KeyError:
            raise self._unknown(number) from None

    def remove(self, number: int) -> _T:
        try:
            return self._things.pop(number)
        except KeyError:
            raise self._unknown(number) from None

    def clear(self) -> list[_T]:
        """Forget all of them, and return them."""
        things = [*self._things.values()]
        self._things.clear()
        return things

    def _unknown(self, number: int) -> CudaError:
        return cuda_error(
            Status.INVALID_HANDLE,
            seen=f"{self._kind} {number} is not of this device, or was destroyed",
        )
