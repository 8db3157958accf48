"""Record memory snapshots of PyTorch in this process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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
            _write_snapshot(path)
        finally:
            memory._record_memory_history(enabled=None)


@contextmanager
def _snapshot_on_out_of_memory(path: str) -> Iterator[None]:
    is_first = True

    def observe(*_: int) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            _write_snapshot(path)

    _attach_out_of_memory_observer(_torch(), observe)
    try:
        yield
    finally:
        is_first = False  # disables the observer, which PyTorch cannot remove


def _write_snapshot(path: str) -> None:
    """Write a snapshot with the memory and the limit of each device in its settings."""
    torch = _torch()
    snapshot = torch.cuda.memory._snapshot()
    snapshot.setdefault("allocator_settings", {}).update(_device_memory(torch))
    with Path(path).open("wb") as file:
        pickle.dump(snapshot, file)


def _device_memory(torch: Any) -> dict[str, list[float]]:
    """Return the memory of each device in bytes, and the fraction of it that this process may use.

    run/agent/memory.py has the same.
    """
    cuda = torch.cuda
    devices = range(cuda.device_count())
    facts = {"device_total_bytes": [cuda.get_device_properties(i).total_memory for i in devices]}
    if hasattr(cuda.memory, "get_per_process_memory_fraction"):  # torch 2.7
        facts["memory_fraction"] = [cuda.memory.get_per_process_memory_fraction(i) for i in devices]
    return facts


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
