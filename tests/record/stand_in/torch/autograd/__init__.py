from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.autograd.graph import _engine_run_backward

T = TypeVar("T")


def backward(work: Callable[[], T], *, fails: bool = False) -> T:
    return _engine_run_backward(work, fails=fails)
