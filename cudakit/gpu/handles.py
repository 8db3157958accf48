"""Checks of ids, sizes and kernel arguments, for the real and the simulated device."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from itertools import count
from typing import Generic, TypeVar

import numpy as np

from cudakit.gpu.api import Argument
from cudakit.gpu.driver_errors import Status, cuda_error

_T = TypeVar("_T")
_Ptr = TypeVar("_Ptr", bound=int)

_POINTER_BYTES = 8


class Handles(Generic[_T]):
    """Objects of one kind, by id. Ids are never reused."""

    def __init__(self, kind: str, *, first: int = 1) -> None:
        self._kind = kind
        self._ids = count(first)  # atomic, so that threads need no lock
        self._objects: dict[int, _T] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def add(self, new_object: _T) -> int:
        """Store an object, and return its id."""
        id_ = next(self._ids)
        self._objects[id_] = new_object
        return id_

    def make(self, factory: Callable[[int], _T]) -> _T:
        """Create, store and return an object that is constructed with its id."""
        id_ = next(self._ids)
        new_object = self._objects[id_] = factory(id_)
        return new_object

    def __getitem__(self, id_: int) -> _T:
        try:
            return self._objects[id_]
        except KeyError:
            raise self._unknown_id_error(id_) from None

    def remove(self, id_: int) -> _T:
        """Remove and return an object. Raises CUDA_ERROR_INVALID_HANDLE for an unknown id."""
        try:
            return self._objects.pop(id_)
        except KeyError:
            raise self._unknown_id_error(id_) from None

    def discard(self, predicate: Callable[[_T], bool]) -> None:
        """Remove the objects for which a predicate is true."""
        for id_ in [
            id_ for id_, stored_object in self._objects.items() if predicate(stored_object)
        ]:
            self._objects.pop(id_, None)

    def clear(self) -> list[_T]:
        """Remove and return all objects, the newest first."""
        objects = [*reversed(self._objects.values())]
        self._objects.clear()
        return objects

    def _unknown_id_error(self, id_: int) -> Exception:
        return cuda_error(
            Status.INVALID_HANDLE,
            detail=f"{self._kind} {id_} does not exist on this device, or was destroyed",
        )


def check_size(size_bytes: int) -> None:
    """Raise CUDA_ERROR_INVALID_VALUE unless the size of an allocation is positive."""
    if size_bytes <= 0:
        raise cuda_error(
            Status.INVALID_VALUE, detail=f"{size_bytes} bytes requested; the size must be positive"
        )


def pop_allocation(allocations: MutableMapping[_Ptr, _T], ptr: _Ptr, detail: str) -> _T:
    """Remove and return an allocation. Raises CUDA_ERROR_INVALID_VALUE if none begins at ``ptr``."""
    try:
        return allocations.pop(ptr)
    except KeyError:
        raise cuda_error(
            Status.INVALID_VALUE, detail=f"{detail} begins at {ptr:#x}; it may already be freed"
        ) from None


def check_arguments(name: str, sizes: tuple[int, ...] | None, args: Sequence[Argument]) -> None:
    """Raise CUDA_ERROR_INVALID_VALUE unless arguments have the sizes of the kernel's parameters.

    The driver copies the declared size of each parameter, not the size of the argument. ``sizes`` are the
    parameter sizes in bytes; None if they are unknown.
    """
    argument_sizes = tuple([_argument_bytes(arg) for arg in args])
    if sizes is not None and argument_sizes != sizes:
        raise cuda_error(
            Status.INVALID_VALUE,
            detail=f"{name} takes arguments of {sizes} bytes, got {argument_sizes}",
        )


def _argument_bytes(arg: Argument) -> int:
    if isinstance(arg, np.generic):
        return arg.itemsize
    if isinstance(arg, int):
        return _POINTER_BYTES
    raise TypeError(
        f"kernel argument {arg!r} has no fixed size: pass an address (Ptr) or a numpy scalar"
    )
