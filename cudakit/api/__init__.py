"""The public Python functions: each returns the result of a command as an object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudakit.api import profiler

if TYPE_CHECKING:
    from cudakit.devices.result import DevicesResult

__all__ = ["devices", "profiler"]


def devices(*, gpu: str = "auto", processes: bool = False, topology: bool = False) -> DevicesResult:
    """List the GPUs of this machine: return the result that ``cudakit devices --json`` prints.

    ``gpu`` is "auto", or "sim" or "sim:MODEL" for a simulated machine. CUDA is queried in a child process, so
    no context is created here and the caller can still fork. Raises EnvironmentUnusable if no GPU is
    available, UsageError for another ``gpu``.

    >>> for device in cudakit.devices(gpu="sim:h200x2").visible:
    ...     print(device.cuda_index, device.name, device.field("multiprocessor_count"))
    0 NVIDIA H200 132
    1 NVIDIA H200 132
    """
    from cudakit.devices import query
    from cudakit.gpu.machine import open_machine

    return query.read_devices(open_machine(gpu), processes=processes, topology=topology)
