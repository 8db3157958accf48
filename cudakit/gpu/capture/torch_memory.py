"""Record memory snapshots of PyTorch in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cudakit.errors import MissingDependency

# The second is the name before torch 2.5.
_OBSERVERS = ("_cuda_attach_out_of_memory_observer", "_cuda_attachOutOfMemoryObserver")


@contextmanager
def record(path: str, *, max_entries: int, stacks: str) -> Iterator[None]:
    """Record what torch allocates on GPUs in the block; see ``cudakit.record_memory``."""
    memory = _torch().cuda.memory
    memory._record_memory_history(stacks=stacks, max_entries=max_entries)
    try:
        with _snapshot_on_out_of_memory("-oom".join(os.path.splitext(path))):
            yield
    finally:
        try:
            memory._dump_snapshot(path)
        finally:
            memory._record_memory_history(enabled=None)


@contextmanager
def _snapshot_on_out_of_memory(path: str) -> Iterator[None]:
    torch, waiting = _torch(), True

    def observe(*_: int) -> None:
        nonlocal waiting
        if waiting:
            waiting = False
            torch.cuda.memory._dump_snapshot(path)

    _observe(torch, observe)
    try:
        yield
    finally:
        waiting = False  # PyTorch has no call that removes an observer


def _torch() -> Any:
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency("torch", purpose="recording its memory") from error
    return torch


def _observe(torch: Any, observer: Callable[..., None]) -> None:
    names = [name for name in _OBSERVERS if hasattr(torch._C, name)]
    if names:
        getattr(torch._C, names[0])(observer)
