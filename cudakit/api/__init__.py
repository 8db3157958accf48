"""The Python calls that users make: each a command without its terminal, or a word to the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudakit.api import profiler

if TYPE_CHECKING:
    from cudakit.core.devices.result import DevicesResult

__all__ = ["devices", "profiler"]


def devices(*, gpu: str = "auto", processes: bool = False, topology: bool = False) -> DevicesResult:
    """Look at the GPUs of this machine: what ``cudakit devices --json`` prints, as an object.

    ``gpu`` is "auto", or "sim" or "sim:MODEL" for a simulated machine. NVML is asked here and the CUDA
    driver in a child process: no context is made, and the caller can still fork. Raises
    EnvironmentUnusable where no GPU can be seen, UsageError for another ``gpu``.

    >>> for device in devices(gpu="sim:h200x2").visible:
    ...     print(device.cuda_index, device.name, device.field("multiprocessor_count"))
    0 NVIDIA H200 132
    1 NVIDIA H200 132
    """
    from cudakit.core.devices import query
    from cudakit.gpu.machine import open_machine

    return query.devices(open_machine(gpu), processes=processes, topology=topology)
