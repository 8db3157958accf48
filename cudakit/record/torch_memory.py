"""Record the memory history of PyTorch in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# Names of PyTorch's function that attaches an observer: in torch 2.5 and newer, and in older versions.
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
        self._has_ended = False
        self._is_recording = False
        self._is_first_oom = True

    def start(self) -> None:
        """Begin recording once PyTorch has initialized CUDA. The program must have imported torch."""
        cuda = sys.modules["torch"].cuda
        # Before CUDA is initialized, PyTorch has no allocators that could record.
        getattr(cuda, "_lazy_call", _call)(self._start_recording)

    def stop(self) -> dict[str, Any] | None:
        """Stop recording PyTorch's memory, and return its snapshot; None if PyTorch did not use CUDA."""
        self._has_ended = True  # disables the observer, which PyTorch cannot remove
        if not self._is_recording:
            return None
        torch = sys.modules["torch"]
        try:
            return _snapshot(torch)
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _start_recording(self) -> None:
        if self._has_ended:
            return
        torch = sys.modules["torch"]
        torch.cuda.memory._record_memory_history(**self._options)
        self._is_recording = True
        _attach_out_of_memory_observer(torch, self._on_out_of_memory)

    def _on_out_of_memory(self, *_: int) -> None:
        if self._is_first_oom and not self._has_ended:
            self._is_first_oom = False
            self._write_oom(_snapshot(sys.modules["torch"]))


def _call(function: Callable[[], None]) -> None:
    function()


def _snapshot(torch: Any) -> dict[str, Any]:
    """Return a snapshot with the memory and the limit of each device in its settings."""
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    snapshot.setdefault("allocator_settings", {}).update(_device_memory(torch))
    return snapshot


def _device_memory(torch: Any) -> dict[str, list[float]]:
    """Return the memory of each device in bytes, and the fraction of it that this process may use.

    The agent has a copy of this function (run/agent/memory.py).
    """
    cuda = torch.cuda
    devices = range(cuda.device_count())
    memory_sizes = {
        "device_total_bytes": [cuda.get_device_properties(i).total_memory for i in devices]
    }
    if hasattr(cuda.memory, "get_per_process_memory_fraction"):  # torch 2.7 and newer
        memory_sizes["memory_fraction"] = [
            cuda.memory.get_per_process_memory_fraction(i) for i in devices
        ]
    return memory_sizes


def _attach_out_of_memory_observer(torch: Any, observer: Callable[..., None]) -> None:
    function_names = [name for name in _ATTACH_FUNCTIONS if hasattr(torch._C, name)]
    if function_names:
        getattr(torch._C, function_names[0])(observer)
