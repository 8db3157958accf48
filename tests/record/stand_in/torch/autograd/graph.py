from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def _engine_run_backward(work: Callable[[], T], *, fails: bool = False) -> T:
    result = work()
    if fails:
        raise ValueError("the backward pass failed")
    return result
