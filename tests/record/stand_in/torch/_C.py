"""Stands in for torch's extension module."""  # noqa: N999 torch's name

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_thread = threading.local()


def _current_graph_task_id() -> int:
    """Return the number of the backward pass that this thread works for, or -1."""
    task: int = getattr(_thread, "task", -1)
    return task


def work_for(task: int, work: Callable[[], T]) -> T:
    """Run a part of a backward pass on this thread."""
    outer, _thread.task = _current_graph_task_id(), task
    try:
        return work()
    finally:
        _thread.task = outer
