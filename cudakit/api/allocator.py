"""The caching allocator as a public class: the allocator of a device, with pinned memory and sharing."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial

from cudakit.allocator.allocator import DeviceCachingAllocator, InvalidPointer, InvalidSize
from cudakit.allocator.blocks import Block
from cudakit.allocator.guard import Reentered
from cudakit.allocator.ipc import OpenedMemory, SharedMemory
from cudakit.allocator.oom import OutOfMemory
from cudakit.allocator.pinned import CachingHostAllocator
from cudakit.allocator.pools import GraphMemory, HeldPool, MemPool, PoolError
from cudakit.allocator.upstream import CaptureGraph, GpuHostUpstream, GpuUpstream
from cudakit.errors import EnvironmentUnusable, Unsupported, UsageError
from cudakit.gpu.api import Gpu, IpcHandle, MemoryInfo, Ptr
from cudakit.gpu.open import open_gpu
from cudakit.torch_rules.oom import PoolId
from cudakit.torch_rules.setting_keys import SettingRefused
from cudakit.torch_rules.settings import effective, parse_config

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


# Methods that share memory with other processes and devices. A closed allocator refuses them like
# allocations.
_SHARING_METHODS = ("share", "ipc_handle", "open_shared", "enable_peer_access")


class ForkedAllocator(EnvironmentUnusable):
    """The process was forked: only its parent can use the memory of the device."""

    def __init__(self) -> None:
        super().__init__(
            "this allocator belongs to the parent of this forked process",
            hint="create an allocator after the fork, or start processes with multiprocessing's 'spawn'",
        )


class CachingAllocator(DeviceCachingAllocator):
    """Allocates memory of one device in stream order and caches it, as PyTorch's allocator does.

    ``device`` is a CUDA ordinal (the current device by default), ``"sim"`` or ``"sim:MODEL"`` for a simulated
    device, or an opened device of cudakit, which ``close`` leaves open. Streams are handles of the driver.
    ``settings`` is a string as in PYTORCH_CUDA_ALLOC_CONF; without it, the first environment variable that is
    set applies: CUDAKIT_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF, PYTORCH_ALLOC_CONF. If
    TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC is 0, expandable segments cannot be shared with other processes. If
    PYTORCH_NO_CUDA_MEMORY_CACHING is 1, caching is off until ``enable_caching(enabled=True)``.

    All memory is freed when the allocator is garbage-collected. At the exit of the interpreter nothing is
    freed, because the driver frees everything. In a forked child the allocator refuses allocations and
    ignores frees. Raises EnvironmentUnusable without a GPU, and SettingRefused with the position for invalid
    settings.

    >>> allocator = cudakit.CachingAllocator("sim")
    >>> ptr = allocator.alloc(1000)
    >>> allocator.statistics()["allocated_bytes.all.current"]
    1024
    >>> allocator.free(ptr)
    """

    def __init__(
        self, device: int | str | Gpu | None = None, *, settings: str | None = None
    ) -> None:
        # The settings are parsed before a CUDA context is created, so that invalid settings create no
        # context.
        if settings is None:
            parsed_settings = effective(os.environ)
        else:
            parsed_settings = parse_config(settings, variable=f"settings {settings!r}")
        gpu, ordinal, self._owns_gpu = _open_device(device)
        shares = os.environ.get("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC") != "0"
        self._gpu = gpu
        self._gpu_upstream = upstream = GpuUpstream(gpu, shares=shares)
        super().__init__(upstream, parsed_settings, device=ordinal)
        # The lambda refers to the captures only: the finalizer keeps the upstream alive, and a reference from
        # it to the allocator would keep the allocator alive, too.
        captures = self._captures
        upstream.ipc.defer_during(lambda: captures.capture_count)
        self._finalizers = [_finalizer(self, upstream, gpu if self._owns_gpu else None)]
        allocator_reference = weakref.ref(self)
        self._at_exit = partial(_ignore_frees_at_exit, allocator_reference)
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=partial(_disable_in_child, allocator_reference))
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1":
            self.enable_caching(enabled=False)
        if hasattr(gpu, "processes"):  # only real devices have processes, which NVML lists
            self.ask_processes(gpu.processes)

    @property
    def device(self) -> int:
        """The CUDA ordinal of the device."""
        return self._device

    @cached_property
    def pinned(self) -> CachingHostAllocator:
        """The allocator of pinned host memory, with the current settings; snapshots include it."""
        upstream = GpuHostUpstream(self._gpu)
        host_allocator = CachingHostAllocator(
            upstream, self.settings, holders=self._engine.private_pools
        )
        if not self._owns_gpu:
            self._finalizers.append(_finalizer(host_allocator, upstream, None))
        self.include_pinned(host_allocator)
        for _ in range(self._captures.capture_count):
            host_allocator.begin_capture()
        return host_allocator

    @property
    def _opened_pinned(self) -> CachingHostAllocator | None:
        """The allocator of pinned memory, if it was used."""
        return self.__dict__.get("pinned")

    @contextmanager
    def capture(
        self,
        pool: HeldPool | PoolId | None = None,
        stream: int | None = None,
        *,
        graph: CaptureGraph | None = None,
    ) -> Iterator[GraphMemory]:
        """Serve a graph capture from a private pool, pinned memory included; yield the holder of the pool.

        The base class describes the arguments and the errors.
        """
        if self._opened_pinned is not None:
            self._opened_pinned.begin_capture()
        try:
            with super().capture(pool, stream, graph=graph) as memory:
                yield memory
        finally:
            if self._opened_pinned is not None:
                self._opened_pinned.end_capture()

    def memory_info(self) -> MemoryInfo:
        """Return the free and the total bytes of the device."""
        return self._gpu.memory_info()

    def close(self) -> None:
        """Free all memory and close the device. A second call does nothing.

        If the device is not owned, free only the cached memory: live allocations stay until the allocator is
        garbage-collected.
        """
        atexit.unregister(self._at_exit)
        try:
            super().close()
        finally:
            self._retire(
                partial(EnvironmentUnusable, "this allocator was closed", hint="create another one")
            )
            if self._owns_gpu:
                self._finalizers[0]()

    # Methods that share memory with other devices and processes.

    def enable_peer_access(self, device: int) -> None:
        """Allow kernels of another device to access all current and later memory of this allocator.

        Repeated calls do nothing. The other device gets permanent access to all plain memory of this context
        (cuCtxEnablePeerAccess), and to the pages of expandable segments (cuMemSetAccess). Raises CudaError,
        and revokes the access that it enabled, if the device does not exist or has no peer access.
        """
        with self._guard:
            if device not in self._gpu_upstream.peers:
                expandable_segments = self._engine.expandable_segments
                self._gpu_upstream.enable_peer(
                    device, expandable_segments.mapped_ranges if expandable_segments else ()
                )

    @property
    def peer_accessible_by(self) -> tuple[int, ...]:
        """The devices that ``enable_peer_access`` enabled; cuda.core has a property with this name."""
        return tuple(sorted(self._gpu_upstream.peers))

    def share(self, ptr: int) -> SharedMemory:
        """Return a description of an allocation, from an address on, that another process can open.

        Pickle the description or send it as text; the other process calls ``open_shared``. First synchronize
        the work on the memory. Keep the memory allocated until the other process has closed it: the allocator
        does not know of that use. Raises InvalidPointer if no allocation contains ``ptr``, Unsupported for
        memory that cannot be shared, CudaError if the driver refuses.
        """
        registry = self._gpu_upstream.ipc
        with self._guard:
            segment_address, size_bytes, block = self._find_allocation(ptr)
            return registry.share(
                ptr, size_bytes, segment_address, block.expandable_segment if block else None
            )

    def ipc_handle(self, ptr: int) -> IpcHandle:
        """Return the handle of the segment that contains an address, and the address's offset in the segment.

        Receivers without cudakit can open the handle (cuIpcGetMemHandle). Raises the errors of ``share``, and
        Unsupported for an expandable segment, which has no such handle.
        """
        registry = self._gpu_upstream.ipc
        with self._guard:
            segment_address, _, block = self._find_allocation(ptr)
            if block is not None and block.expandable_segment is not None:
                raise Unsupported(
                    f"the memory at {ptr:#x} is in an expandable segment, which has no handle of"
                    " cuIpcGetMemHandle",
                    hint="use share() and open_shared(), or set expandable_segments:False",
                )
            return IpcHandle(registry.ipc_handle(Ptr(segment_address)), ptr - segment_address)

    def open_shared(self, shared: SharedMemory) -> OpenedMemory:
        """Open memory that another process shares. Each segment is opened once per process.

        The allocator's device must be the device that has the memory (its ordinal may differ between
        processes), or, for pages with fabric handles, any device of the fabric. Raises UsageError for memory
        of this process or of another device, EnvironmentUnusable if that process has ended or its file
        descriptors cannot be duplicated, CudaError if the driver refuses.
        """
        registry = self._gpu_upstream.ipc
        return OpenedMemory(registry.open_memory(shared), shared, registry, self)

    def _find_allocation(self, ptr: int) -> tuple[int, int, Block | None]:
        """Return the start of an address's segment, the requested bytes from the address on, and its block.

        The block is None for memory that was allocated without caching. The caller holds the guard. Raises
        InvalidPointer, and Unsupported for memory of a pool with its own upstream.
        """
        if ptr in self._uncached_sizes:
            return ptr, self._uncached_sizes[ptr], None
        block = self._live_blocks.get(ptr) or self._engine.segments.block_at(ptr)
        if (
            block is None
            or self._live_blocks.get(block.ptr) is not block
            or block.ptr + block.requested <= ptr
        ):
            raise InvalidPointer(
                f"nothing is allocated at {ptr:#x}: {self._describe_invalid_pointer(ptr)}",
                hint="share an address within the requested bytes of a live allocation",
            )
        if self._engine.private_pools.segment_source(block.pool.id) is not None:
            raise Unsupported(
                f"the memory at {ptr:#x} belongs to a pool with its own upstream",
                hint="share it by the functions of that upstream",
            )
        first_block = block
        while first_block.prev is not None:
            first_block = first_block.prev
        return first_block.ptr, block.ptr + block.requested - ptr, block

    # Methods for the end of the allocator, of the interpreter, and in a forked process.

    def _retire(self, new_refusal: Callable[[], Exception]) -> None:
        """Make allocations and sharing raise an error, and ignore all other calls that change memory."""

        def refuse(*_: object, **__: object) -> None:
            raise new_refusal()

        self._new_refusal = new_refusal
        self._set_slow("retired", is_on=True)
        ignoring_methods = dict.fromkeys(("record_use", "empty_cache", "close"), _do_nothing)
        # Functions in the object's __dict__ replace the methods of its class.
        self.__dict__.update(ignoring_methods | dict.fromkeys(_SHARING_METHODS, refuse))
        if (pinned := self._opened_pinned) is not None:
            pinned.__dict__.update(ignoring_methods | {"free": _do_nothing, "alloc": refuse})


def _open_device(device: int | str | Gpu | None) -> tuple[Gpu, int, bool]:
    """Return the device, its ordinal, and whether this function opened it."""
    if isinstance(device, str):
        if device.partition(":")[0] != "sim":
            raise UsageError(
                f"no such device: {device!r}",
                hint="give a CUDA ordinal such as 0, sim or sim:MODEL",
            )
        return open_gpu(device), 0, True
    if device is not None and not isinstance(device, int):
        return device, int(getattr(device, "ordinal", 0)), False
    from cudakit.gpu.cuda.current import current_device
    from cudakit.gpu.cuda.device import Cuda

    ordinal = current_device() if device is None else device
    return Cuda(ordinal, foreign_streams=True), ordinal, True


def _finalizer(
    owner: object, upstream: GpuUpstream | GpuHostUpstream, gpu: Gpu | None
) -> weakref.finalize[[], object]:
    """Return a finalizer that releases the memory of an allocator, and closes its device if one is given."""

    def release_memory() -> None:
        upstream.release_all()
        if gpu is not None:
            gpu.close()

    finalizer = weakref.finalize(owner, release_memory)
    finalizer.atexit = False
    return finalizer


def _ignore_frees_at_exit(allocator_reference: weakref.ref[CachingAllocator]) -> None:
    """Ignore frees from now on: the driver may be unloaded before the last free."""
    allocator = allocator_reference()
    if allocator is not None:
        allocator._set_slow("retired", is_on=True)
        if allocator._opened_pinned is not None:
            allocator._opened_pinned.__dict__["free"] = _do_nothing


def _disable_in_child(allocator_reference: weakref.ref[CachingAllocator]) -> None:
    """Disable the allocator in a forked child, which must not use the memory of its parent."""
    allocator = allocator_reference()
    if allocator is not None:
        for finalizer in allocator._finalizers:
            finalizer.detach()
        # Another thread of the parent may have held the lock. That thread does not exist in the child.
        allocator._guard.replace_lock()
        allocator._retire(ForkedAllocator)


def _do_nothing(*_: object, **__: object) -> None:
    pass
