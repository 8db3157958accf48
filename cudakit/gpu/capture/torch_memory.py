"""Record the memory history of PyTorch in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# Names of PyTorch's function that attaches an observer: since torch 2.5, and before.
_ATTACH_FUNCTIONS = ("_cuda_attach_out_of_memory_observer", "_cuda_attachOutOfMemoryObserver")


class TorchHistory:
    """PyTorch's memory history, which has one state per process.

    ``write_oom`` gets the snapshot of the first out-of-memory error, before the error is raised.
    """

    def __init__(
        self, *, max_entries: int, stacks: str, write_oom: Callable[[dict[str, Any]], None]
    ) -> None:
        self._options = {"stacks": stacks, "max_entries": max_entries}
        self._write_oom = write_oom
        self._observes = False
        self._is_recording = False

    def start(self) -> None:
        """Begin recording; torch is imported."""
        torch = sys.modules["torch"]
        torch.cuda.memory._record_memory_history(**self._options)
        self._is_recording = self._observes = True
        _attach_out_of_memory_observer(torch, self._out_of_memory)

    def stop(self) -> dict[str, Any] | None:
        """Stop recording, and return the snapshot; None if torch was never imported."""
        self._observes = False  # disables the observer, which PyTorch cannot remove
        if not self._is_recording:
            return None
        try:
            return _snapshot(sys.modules["torch"])
        finally:
            sys.modules["torch"].cuda.memory._record_memory_history(enabled=None)

    def _out_of_memory(self, *_: int) -> None:
        if self._observes:
            self._observes = False
            self._write_oom(_snapshot(sys.modules["torch"]))


def _snapshot(torch: Any) -> dict[str, Any]:
    """Return a snapshot with the memory and the limit of each device in its settings."""
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    snapshot.setdefault("allocator_settings", {}).update(_device_memory(torch))
    return snapshot


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


def _attach_out_of_memory_observer(torch: Any, observer: Callable[..., None]) -> None:
    names = [name for name in _ATTACH_FUNCTIONS if hasattr(torch._C, name)]
    if names:
        getattr(torch._C, names[0])(observer)
