"""The caching allocator: classes, whose bases are imported when somebody first asks for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

# Of a resource of cuda.core, which is compared with DeviceMemoryResource first.
_FRONT_CACHE = 64

if TYPE_CHECKING:
    from cudakit.core.allocator.device_allocator import DeviceAllocator
    from cudakit.core.allocator.ipc import OpenedMemory as OpenedMemory
    from cudakit.core.allocator.mem_pool import GraphMemory as GraphMemory
    from cudakit.core.allocator.mem_pool import MemPool as MemPool
    from cudakit.core.allocator.oom import OutOfMemory as OutOfMemory
    from cudakit.core.allocator.private_pools import PoolError as PoolError
    from cudakit.core.allocator.shared_memory import SharedMemory as SharedMemory
    from cudakit.gpu.api import Gpu
    from cudakit.gpu.api.allocator import Allocator
    from cudakit.gpu.plugs.cuda_core import AllocatorResource
    from cudakit.torch_rules.settings import Settings

    class CachingAllocator(DeviceAllocator):
        """Declared here for checkers of types; see ``_caching_allocator``."""

        def __init__(
            self,
            device: int | str | Gpu | None = None,
            *,
            settings: str | None = None,
            front_cache: int = 0,
        ) -> None: ...

    class CachingMemoryResource(AllocatorResource):
        """Declared here for checkers of types; see ``_caching_memory_resource``."""

        def __init__(
            self,
            device: int | str | Gpu | None = None,
            *,
            settings: str | None = None,
            front_cache: int = _FRONT_CACHE,
            allocator: Allocator | None = None,
        ) -> None: ...


def _caching_allocator() -> type:
    from cudakit.core.allocator.device_allocator import DeviceAllocator

    class CachingAllocator(DeviceAllocator):
        """Memory of a device, cached and in the order of streams, as torch's allocator does, without torch.

        ``device`` is CUDA's number of one, the current one by default, or ``"sim"`` or ``"sim:MODEL"`` for
        a simulated one, or a device of cudakit, which is not closed. Streams are the driver's handles.
        ``settings`` is a string as in PYTORCH_CUDA_ALLOC_CONF; without one the first that is set of
        CUDAKIT_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF counts. ``front_cache`` keeps up to
        so many freed blocks of each size for a request of exactly that size: much faster, with other
        addresses than torch's. With TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=0 in the environment expandable
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

    return CachingAllocator


def _caching_memory_resource() -> type:
    from cudakit.errors import MissingDependency

    try:
        from cudakit.gpu.plugs.cuda_core import AllocatorResource
    except MissingDependency as error:
        return _unusable(error)

    class CachingMemoryResource(AllocatorResource):
        """The caching allocator as a MemoryResource of cuda.core; ``Device.memory_resource`` takes it.

        ``device``, ``settings`` and ``front_cache`` are those of ``CachingAllocator``, which is made, unless
        there is one: ``allocator``. It is to be had as ``resource.allocator``. With ``front_cache=0`` blocks
        are chosen as by torch, and a Buffer takes twice as long. Raises MissingDependency without cuda.core.

        >>> resource = cudakit.CachingMemoryResource(0)  # doctest: +SKIP
        >>> with resource.allocate(1 << 20, stream=stream) as buffer:  # doctest: +SKIP
        ...     launch(stream, config, kernel, buffer)
        """

        def __init__(
            self,
            device: int | str | Gpu | None = None,
            *,
            settings: str | None = None,
            front_cache: int = _FRONT_CACHE,
            allocator: Allocator | None = None,
        ) -> None:
            super().__init__(allocator or _new_allocator(device, settings, front_cache))

    return CachingMemoryResource


def _graph_memory() -> type:
    from cudakit.core.allocator.mem_pool import GraphMemory

    return GraphMemory


def _mem_pool() -> type:
    from cudakit.core.allocator.mem_pool import MemPool

    return MemPool


def _opened_memory() -> type:
    from cudakit.core.allocator.ipc import OpenedMemory

    return OpenedMemory


def _out_of_memory() -> type:
    from cudakit.core.allocator.oom import OutOfMemory

    return OutOfMemory


def _pool_error() -> type:
    from cudakit.core.allocator.private_pools import PoolError

    return PoolError


def _shared_memory() -> type:
    from cudakit.core.allocator.shared_memory import SharedMemory

    return SharedMemory


def _unusable(error: Exception) -> type:
    """Return a class that cannot be made, so that its name at least is there."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    return type("CachingMemoryResource", (), {"__init__": refuse, "__doc__": str(error)})


_CLASSES: dict[str, Callable[[], type]] = {
    "CachingAllocator": _caching_allocator,
    "CachingMemoryResource": _caching_memory_resource,
    "GraphMemory": _graph_memory,
    "MemPool": _mem_pool,
    "OpenedMemory": _opened_memory,
    "OutOfMemory": _out_of_memory,
    "PoolError": _pool_error,
    "SharedMemory": _shared_memory,
}


def __getattr__(name: str) -> type:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in globals():
        made = _CLASSES[name]()
        made.__qualname__ = name  # not that of the function which it was made in
        globals()[name] = made
    found: type = globals()[name]
    return found


def _new_allocator(
    device: int | str | Gpu | None, settings: str | None, front_cache: int
) -> CachingAllocator:
    # Within this module the name is found by nobody but its __getattr__.
    kind = __getattr__("CachingAllocator")
    made: CachingAllocator = kind(device, settings=settings, front_cache=front_cache)
    return made


def _settings(text: str | None) -> Settings:
    import os

    from cudakit.torch_rules.settings import effective, parse_config

    return effective(os.environ) if text is None else parse_config(text, variable="settings")


def _shares_pages() -> bool:
    """Say whether pages have handles for other processes: unless the environment says no, as to torch."""
    import os

    return os.environ.get("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC") != "0"


def _caches_nothing() -> bool:
    """Say whether the environment wants a request to be one of the driver, as to torch: it asks for "1"."""
    import os

    return os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"


def _opened(device: int | str | Gpu | None) -> tuple[Gpu, int, bool]:
    """Return a device, its number, and whether it was opened here."""
    if isinstance(device, str):
        return _simulated(device), 0, True
    if device is None or isinstance(device, int):
        return _real(device)
    return device, int(getattr(device, "ordinal", 0)), False


def _simulated(name: str) -> Gpu:
    from cudakit.errors import UsageError
    from cudakit.gpu.open import open_gpu

    if name.partition(":")[0] != "sim":
        raise UsageError(
            f"no such device: {name!r}", hint="give CUDA's number of one, or sim or sim:MODEL"
        )
    return open_gpu(name)


def _real(device: int | None) -> tuple[Gpu, int, bool]:
    from cudakit.gpu.cuda.current import current_device
    from cudakit.gpu.cuda.foreign import ForeignStreams

    number = current_device() if device is None else device
    return ForeignStreams(number), number, True
