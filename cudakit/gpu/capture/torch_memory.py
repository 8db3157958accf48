"""Record memory snapshots of PyTorch in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cudakit.errors import MissingDependency

# Names of PyTorch's function that attaches an observer: since torch 2.5, and before.
_ATTACH_FUNCTIONS = ("_cuda_attach_out_of_memory_observer", "_cuda_attachOutOfMemoryObserver")


@contextmanager
def record(path: str, *, max_entries: int, stacks: str) -> Iterator[None]:
    """Record PyTorch's GPU allocations in the block, and write a snapshot; see ``cudakit.record_memory``."""
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
    torch, is_first = _torch(), True

    def observe(*_: int) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            torch.cuda.memory._dump_snapshot(path)

    _attach_out_of_memory_observer(torch, observe)
    try:
        yield
    finally:
        is_first = False  # disables the observer, which PyTorch cannot remove


def _torch() -> Any:
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency("torch", purpose="recording its memory") from error
    return torch


def _attach_out_of_memory_observer(torch: Any, observer: Callable[..., None]) -> None:
    names = [name for name in _ATTACH_FUNCTIONS if hasattr(torch._C, name)]
    if names:
        getattr(torch._C, names[0])(observer)
