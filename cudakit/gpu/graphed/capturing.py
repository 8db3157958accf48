"""Captures that end, whatever happens inside, and say why nothing came of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from cudakit.errors import CudaError
from cudakit.gpu.graphed.refusals import is_refusal, refusal

_T = TypeVar("_T")
_G = TypeVar("_G")


def captured(
    work: Callable[[], _T],
    *,
    begin: Callable[[], object],
    end: Callable[[], _G],
    drop: Callable[[_G], object],
) -> tuple[_G, _T]:
    """Do some work within a capture; return what ``end`` and the work returned.

    Raises CudaError for what cannot be captured, and else what the work raises; ``drop`` is then given what
    was captured for nothing.
    """
    with _collector_off():
        begin()
        try:
            value = work()
        except BaseException as error:
            spoiled = _broken_off(end, drop)
            if isinstance(error, Exception) and (spoiled or is_refusal(error)):
                raise refusal(error, spoiled) from error
            raise
        try:
            return end(), value
        except (CudaError, RuntimeError) as spoiled:  # the latter is torch's
            raise refusal(spoiled) from spoiled


def _broken_off(end: Callable[[], _G], drop: Callable[[_G], object]) -> Exception | None:
    """End a capture for nothing; return the error that this gives where it was spoiled."""
    try:
        drop(end())
    except (CudaError, RuntimeError) as spoiled:
        return spoiled
    return None


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keep the garbage collector from freeing memory of a device, or unloading kernels, amid a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
