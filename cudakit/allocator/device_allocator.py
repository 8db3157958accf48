"""The allocator of a Gpu, which closes the device, and handles forks and the exit of the interpreter."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial

from cudakit.allocator.allocator import CachingAllocator
from cudakit.allocator.pinned.allocator import CachingHostAllocator
from cudakit.allocator.pinned.upstream import GpuHostUpstream
from cudakit.allocator.private_pools import GraphMemory, HeldPool
from cudakit.allocator.upstream import CaptureGraph, GpuUpstream
from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.api import Gpu, MemoryInfo
from cudakit.torch_rules.oom_facts import PoolId
from cudakit.torch_rules.settings import Settings

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


class DeviceAllocator(CachingAllocator):
    """The allocator of a Gpu.

    When the allocator is garbage-collected, all its memory is freed, in use or not; with ``owned`` the Gpu is
    closed too. At the exit of the interpreter nothing is freed, because the driver frees everything. In a
    forked child the allocator refuses allocations and ignores frees.
    """

    def __init__(
        self,
        gpu: Gpu,
        settings: Settings,
        *,
        device: int = 0,
        owned: bool = True,
        shares: bool = True,
    ) -> None:
        upstream = GpuUpstream(gpu, shares=shares)
        super().__init__(upstream, settings, device=device)
        self._gpu = gpu
        self._owns_gpu = owned
        self._finalizers = [_finalizer(self, upstream, gpu if owned else None)]
        allocator_reference = weakref.ref(self)
        self._at_exit = partial(_ignore_frees_at_exit, allocator_reference)
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=partial(_disable_in_child, allocator_reference))

    @property
    def device(self) -> int:
        """The CUDA ordinal of the device."""
        return self._state.device

    @cached_property
    def pinned(self) -> CachingHostAllocator:
        """The allocator of pinned host memory, with the current settings; snapshots include it."""
        upstream = GpuHostUpstream(self._gpu)
        host_allocator = CachingHostAllocator(
            upstream, self.settings, holders=self._state.engine.private_pools
        )
        if not self._owns_gpu:
            self._finalizers.append(_finalizer(host_allocator, upstream, None))
        self.include_pinned(host_allocator)
        for _ in range(self._state.captures.capture_count):
            host_allocator.begin_capture()
        return host_allocator

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
        self._call_pinned(CachingHostAllocator.begin_capture)
        try:
            with super().capture(pool, stream, graph=graph) as memory:
                yield memory
        finally:
            self._call_pinned(CachingHostAllocator.end_capture)

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
            self._retire(_closed_error)
            if self._owns_gpu:
                self._finalizers[0]()

    def _call_pinned(self, method_name: Callable[[CachingHostAllocator], None]) -> None:
        """Call a method of the allocator of pinned memory, if there is one."""
        pinned = self.__dict__.get("pinned")
        if pinned is not None:
            method_name(pinned)

    def _retire(self, new_refusal: Callable[[], Exception]) -> None:
        """Make allocations and sharing raise an error, and ignore all other calls that change memory."""

        def refuse(*_: object, **__: object) -> None:
            raise new_refusal()

        self._state.retire(new_refusal)
        ignoring_methods = dict.fromkeys(("record_use", "empty_cache", "close"), _do_nothing)
        # Functions in the object's __dict__ replace the methods of its class.
        self.__dict__.update(ignoring_methods | dict.fromkeys(_SHARING_METHODS, refuse))
        pinned = self.__dict__.get("pinned")
        if pinned is not None:
            pinned.__dict__.update(ignoring_methods | {"free": _do_nothing, "alloc": refuse})

    def _ignore_frees(self) -> None:
        self._state.retire(None)
        pinned = self.__dict__.get("pinned")
        if pinned is not None:
            pinned.__dict__["free"] = _do_nothing


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


def _ignore_frees_at_exit(allocator_reference: weakref.ref[DeviceAllocator]) -> None:
    """Ignore frees from now on: the driver may be unloaded before the last free."""
    allocator = allocator_reference()
    if allocator is not None:
        allocator._ignore_frees()


def _disable_in_child(allocator_reference: weakref.ref[DeviceAllocator]) -> None:
    """Disable the allocator in a forked child, which must not use the memory of its parent."""
    allocator = allocator_reference()
    if allocator is not None:
        for finalizer in allocator._finalizers:
            finalizer.detach()
        # Another thread of the parent may have held the lock. That thread does not exist in the child.
        allocator._state.guard.replace_lock()
        allocator._retire(ForkedAllocator)


def _do_nothing(*_: object, **__: object) -> None:
    pass


def _closed_error() -> Exception:
    return EnvironmentUnusable("this allocator was closed", hint="create another one")
