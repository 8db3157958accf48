"""The caching allocator as a public class, and its errors."""

from __future__ import annotations

import os

from cudakit.allocator.device_allocator import DeviceAllocator, ForkedAllocator
from cudakit.allocator.guard import Reentered
from cudakit.allocator.ipc import OpenedMemory, SharedMemory
from cudakit.allocator.oom import OutOfMemory
from cudakit.allocator.private_pools import GraphMemory, MemPool, PoolError
from cudakit.allocator.state import InvalidPointer, InvalidSize
from cudakit.errors import InputError, UsageError
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
    """Allocates memory of one device in stream order and caches it, as PyTorch's allocator does.

    ``device`` is a CUDA ordinal (the current device by default), ``"sim"`` or ``"sim:MODEL"`` for a simulated
    device, or an opened device of cudakit, which ``close`` leaves open. Streams are handles of the driver.
    ``settings`` is a string as in PYTORCH_CUDA_ALLOC_CONF; without it, the first environment variable that is
    set applies: CUDAKIT_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF, PYTORCH_ALLOC_CONF. ``front_cache`` has no
    effect any more. If TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC is 0, expandable segments cannot be shared with
    other processes. If PYTORCH_NO_CUDA_MEMORY_CACHING is 1, caching is off until
    ``enable_caching(enabled=True)``.

    All memory is freed when the allocator is garbage-collected. Raises EnvironmentUnusable without a GPU, and
    SettingRefused with the position for invalid settings.

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
        if front_cache < 0:
            raise InputError(f"a front cache of {front_cache} blocks", hint="leave front_cache out")
        # The settings are parsed before a CUDA context is created, so that invalid settings create no
        # context.
        parsed_settings = _parse_settings(settings)
        gpu, ordinal, owns_device = _open_device(device)
        super().__init__(
            gpu,
            parsed_settings,
            device=ordinal,
            owned=owns_device,
            shares=_shares_pages(),
        )
        if _is_caching_off():
            self.enable_caching(enabled=False)
        if hasattr(gpu, "processes"):  # only real devices have processes, which NVML lists
            self.ask_processes(gpu.processes)


def _parse_settings(text: str | None) -> Settings:
    """Parse a settings string; if it is None, parse the setting in the environment variables."""
    if text is None:
        return effective(os.environ)
    return parse_config(text, variable=f"settings {text!r}")


def _shares_pages() -> bool:
    """Return whether PyTorch's environment variable allows sharing pages with other processes."""
    return os.environ.get("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC") != "0"


def _is_caching_off() -> bool:
    """Return whether PyTorch's environment variable turns caching off."""
    return os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"


def _open_device(device: int | str | Gpu | None) -> tuple[Gpu, int, bool]:
    """Return the device, its ordinal, and whether this function opened it."""
    if isinstance(device, str):
        return _open_simulated(device), 0, True
    if device is None or isinstance(device, int):
        return _open_real(device)
    return device, int(getattr(device, "ordinal", 0)), False


def _open_simulated(name: str) -> Gpu:
    if name.partition(":")[0] != "sim":
        raise UsageError(
            f"no such device: {name!r}", hint="give a CUDA ordinal such as 0, sim or sim:MODEL"
        )
    return open_gpu(name)


def _open_real(device: int | None) -> tuple[Gpu, int, bool]:
    from cudakit.gpu.cuda.current import current_device
    from cudakit.gpu.cuda.device import Cuda

    ordinal = current_device() if device is None else device
    return Cuda(ordinal, foreign_streams=True), ordinal, True
