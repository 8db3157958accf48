"""The caching allocator: memory of a device without torch."""

from __future__ import annotations

import os

from cudakit.core.allocator.device_allocator import DeviceAllocator, ForkedAllocator
from cudakit.core.allocator.guard import Reentered
from cudakit.core.allocator.ipc import OpenedMemory, SharedMemory
from cudakit.core.allocator.oom import OutOfMemory
from cudakit.core.allocator.private_pools import GraphMemory, MemPool, PoolError
from cudakit.core.allocator.state import InvalidPointer, InvalidSize
from cudakit.errors import UsageError
from cudakit.gpu.api import Gpu
from cudakit.gpu.open import open_gpu
from cudakit.torch_rules.setting_rules import SettingRefused
from cudakit.torch_rules.settings import Settings, effective, parse_config

__all__ = [
    "CachingAllocator",
    "ForkedAllocator",
    "GraphMemory",
    "InvalidPointer",
    "InvalidSize",
    "MemPool",
    "OpenedMemory",
    "OutOfMemory",
    "PoolError",
    "Reentered",
    "SettingRefused",
    "SharedMemory",
]


class CachingAllocator(DeviceAllocator):
    """Memory of a device, cached and in the order of streams, as torch's allocator does, without torch.

    ``device`` is CUDA's number of one, the current one by default, or ``"sim"`` or ``"sim:MODEL"`` for
    a simulated one, or a device of cudakit, which is not closed. Streams are the driver's handles.
    ``settings`` is a string as in PYTORCH_CUDA_ALLOC_CONF; without one the first that is set of
    CUDAKIT_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF counts. ``front_cache`` is for
    installations without a compiler: it keeps up to N freed blocks of each size for requests of exactly
    that size, which are faster then, with other addresses than torch's. The compiled calls are faster
    without it, and ignore it. With TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=0 in the environment expandable
    segments are never shared with other processes; with PYTORCH_NO_CUDA_MEMORY_CACHING=1 nothing is
    cached, until ``enable_caching`` is told otherwise.

    What it allocated lives as long as it does. Raises EnvironmentUnusable without a GPU, InputError for
    settings that cannot be, with the character.

    >>> allocator = cudakit.CachingAllocator("sim")
    >>> ptr = allocator.alloc(1000)
    >>> allocator.statistics()["allocated_bytes.all.current"]
    1024
    >>> allocator.free(ptr)
    """

    def __init__(
        self,
        device: int | str | Gpu | None = None,
        *,
        settings: str | None = None,
        front_cache: int = 0,
    ) -> None:
        chosen = _settings(settings)  # before a context is made for what cannot be
        gpu, number, owned = _opened(device)
        super().__init__(
            gpu,
            chosen,
            device=number,
            front_cache=front_cache,
            owned=owned,
            shares=_shares_pages(),
        )
        if _caches_nothing():
            self.enable_caching(enabled=False)
        if hasattr(gpu, "processes"):  # whom NVML knows of a real device
            self.ask_processes(gpu.processes)


def _settings(text: str | None) -> Settings:
    return effective(os.environ) if text is None else parse_config(text, variable="settings")


def _shares_pages() -> bool:
    """Return whether pages get handles for other processes, as torch reads it from the environment."""
    return os.environ.get("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC") != "0"


def _caches_nothing() -> bool:
    """Return whether the environment turns caching off, by torch's variable and value."""
    return os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"


def _opened(device: int | str | Gpu | None) -> tuple[Gpu, int, bool]:
    """Return a device, its number, and whether it was opened here."""
    if isinstance(device, str):
        return _simulated(device), 0, True
    if device is None or isinstance(device, int):
        return _real(device)
    return device, int(getattr(device, "ordinal", 0)), False


def _simulated(name: str) -> Gpu:
    if name.partition(":")[0] != "sim":
        raise UsageError(
            f"no such device: {name!r}", hint="give CUDA's number of one, or sim or sim:MODEL"
        )
    return open_gpu(name)


def _real(device: int | None) -> tuple[Gpu, int, bool]:
    from cudakit.gpu.cuda.current import current_device
    from cudakit.gpu.cuda.device import Cuda

    number = current_device() if device is None else device
    return Cuda(number, foreign_streams=True), number, True
