"""An allocator that has a device: it gives it back, and knows the end of its process, and forks."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial

from cudakit.core.allocator.caching import CachingAllocator
from cudakit.core.allocator.hot_path import Alloc, Free
from cudakit.core.allocator.mempool import GraphMemory, HeldPool
from cudakit.core.allocator.pinned.caching import CachingHostAllocator
from cudakit.core.allocator.pinned.upstream import PinnedOfGpu
from cudakit.core.allocator.pools import PoolId
from cudakit.core.allocator.reuse import CaptureGraph
from cudakit.core.allocator.upstream import OfGpu
from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.api import Gpu, MemoryInfo, Ptr
from cudakit.torch_rules.settings import Settings

# What reaches other processes and devices, and is refused as memory is.
_OF_OTHERS = ("share", "ipc_handle", "open_shared", "enable_peer_access")


class ForkedAllocator(EnvironmentUnusable):
    """The process was forked, and memory of a device does not go with it."""

    def __init__(self) -> None:
        super().__init__(
            "this allocator belongs to the process that this one was forked from, as its memory does",
            hint="make an allocator after the fork, or start processes by multiprocessing's 'spawn'",
        )


class OpenedAllocator(CachingAllocator):
    """The allocator of a Gpu, for as long as both are used.

    ``owned`` says whether the Gpu goes with it: when nobody has the allocator any more, all its memory is
    given back. When the interpreter ends nothing is freed any more, and the driver takes all of it. In a
    child that was forked it allocates nothing, and frees in silence.
    """

    alloc: Alloc
    free: Free

    def __init__(
        self,
        gpu: Gpu,
        settings: Settings,
        *,
        device: int = 0,
        front_cache: int = 0,
        owned: bool = True,
        shares: bool = True,
    ) -> None:
        upstream = OfGpu(gpu, shares=shares)
        super().__init__(upstream, settings, device=device, front_cache=front_cache)
        self._gpu = gpu
        self._finalizer = weakref.finalize(self, gpu.close if owned else _nothing)
        self._finalizer.atexit = False
        me = weakref.ref(self)
        self._at_exit = partial(_at_exit, me)
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=partial(_in_child, me))

    @property
    def device(self) -> int:
        """CUDA's number of the device."""
        return self._device

    @cached_property
    def pinned(self) -> CachingHostAllocator:
        """The pool of pinned memory of the host, with the settings of now; snapshots have it, too."""
        pool = CachingHostAllocator(
            PinnedOfGpu(self._gpu), self.settings, holders=self._cache.private
        )
        self.include_pinned(pool)
        for _ in range(self._uses.captures):
            pool.begin_capture()
        return pool

    @contextmanager
    def capture(
        self,
        pool: HeldPool | PoolId | None = None,
        stream: int | None = None,
        *,
        graph: CaptureGraph | None = None,
    ) -> Iterator[GraphMemory]:
        """Let what is captured within have memory of a pool, and return what holds it for the graph.

        As of any allocator; besides, no event of the pinned pool is asked meanwhile.
        """
        self._tell_pinned(CachingHostAllocator.begin_capture)
        try:
            with super().capture(pool, stream, graph=graph) as memory:
                yield memory
        finally:
            self._tell_pinned(CachingHostAllocator.end_capture)

    def memory_info(self) -> MemoryInfo:
        """Return the bytes of the device that are free, and all that it has."""
        return self._gpu.memory_info()

    def close(self) -> None:
        """Give back the device, with all memory; of one that is not owned, what nobody has allocated.

        A second time does nothing.
        """
        atexit.unregister(self._at_exit)
        try:
            super().close()
        finally:
            self._retire(_closed)
            self._finalizer()

    def _tell_pinned(self, what: Callable[[CachingHostAllocator], None]) -> None:
        """Tell something to the pinned pool, unless nobody has asked for it yet."""
        pool = self.__dict__.get("pinned")
        if pool is not None:
            what(pool)

    def _retire(self, alloc: object) -> None:
        """Allocate as said from now on, reach others as little, and do nothing else."""
        self._become(dict.fromkeys(("free", "record_use", "empty_cache", "close"), _nothing))
        self._become({"alloc": alloc})
        self.__dict__.update(dict.fromkeys(_OF_OTHERS, alloc))

    def _become(self, calls: dict[str, object]) -> None:
        """Let other functions be called, of the pinned pool as well: attributes go before methods."""
        for each in filter(None, (self, self.__dict__.get("pinned"))):
            each.__dict__.update(calls)


def _at_exit(reference: weakref.ref[OpenedAllocator]) -> None:
    """Free nothing from now on: the driver may go before what still has memory."""
    allocator = reference()
    if allocator is not None:
        allocator._become({"free": _nothing})


def _in_child(reference: weakref.ref[OpenedAllocator]) -> None:
    allocator = reference()
    if allocator is not None:
        allocator._finalizer.detach()
        # Another thread of the parent may have had the lock, and is not here to give it back.
        allocator._guard = type(allocator._guard)()
        allocator._retire(_forked)


def _nothing(*_: object, **__: object) -> None:
    pass


def _forked(*_: object, **__: object) -> Ptr:
    raise ForkedAllocator


def _closed(*_: object, **__: object) -> Ptr:
    raise EnvironmentUnusable("this allocator was closed", hint="make another one")
