"""The state of one allocator, which its methods share, and the reasons why its fast path is off."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from itertools import count
from operator import attrgetter, index
from types import ModuleType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
)

from cudakit.core.allocator.blocks import PLAIN_TYPES, Block, RawStack
from cudakit.core.allocator.engine import Engine
from cudakit.core.allocator.fast_path import FastPath, SlowCalls
from cudakit.core.allocator.guard import Gate, Guard
from cudakit.core.allocator.history import Events, History
from cudakit.core.allocator.private_pools import PrivatePool
from cudakit.core.allocator.segment_cache import SegmentCache
from cudakit.core.allocator.streams import Captures, PendingFrees
from cudakit.core.allocator.upstream import Upstream, stream_number
from cudakit.errors import Unsupported, UsageError
from cudakit.torch_rules.settings import Settings
from cudakit.units import format_bytes

if TYPE_CHECKING:
    from cudakit.core.allocator.native import FastPath as NativeFastPath

# Reasons why the fast path is off.
SlowPathReason: TypeAlias = Literal[
    "uncached", "history", "watched", "routed", "pending", "settings", "retired"
]
# A block to be freed, the stack of the free, and the stream of the free.
QueuedFree: TypeAlias = tuple[Block, "RawStack | None", "int | None"]

_MAX_INVALID_FREES = 1000

_P = ParamSpec("_P")
_R = TypeVar("_R")


class InvalidPointer(UsageError):
    """No live allocation begins at this address: it was freed before, or never allocated here."""


class InvalidSize(UsageError, ValueError):
    """The size of a request is negative."""


@dataclass(frozen=True, slots=True)
class InvalidFree:
    """A free of an address at which no live allocation begins."""

    ptr: int
    reason: str
    stack: RawStack | None


def native_module() -> ModuleType | None:
    """Return the module of the native types; None if they were not compiled."""
    try:
        return import_module("cudakit.core.allocator.native")
    except ImportError:
        return None


class AllocatorState:
    """The state of the allocator of one device. ``live`` has the allocated blocks by address.

    ``native`` selects the native or the plain types; None selects the native types if they were compiled.

    ``uncached`` has the sizes of allocations that were made while caching was off, by address.
    ``refusal`` is None until the allocator is closed or its process was forked; then it returns the error of
    later allocations.
    """

    def __init__(
        self,
        upstream: Upstream,
        settings: Settings,
        *,
        device: int,
        native: bool | None,
    ) -> None:
        self.upstream = upstream
        self.device = device
        compiled = native_module() if native is not False else None
        if native and compiled is None:
            raise Unsupported("the native types of the allocator were not compiled")
        self.gate: Gate = compiled.Gate() if compiled else Gate()
        self.guard: Guard[QueuedFree] = Guard(lambda queued: self.free_live(*queued), self.gate)
        self.history = History(compiled.Events if compiled else Events)
        self.engine = Engine(upstream, settings, compiled.TYPES if compiled else PLAIN_TYPES)
        self.cache = SegmentCache(self.engine)
        self.captures = Captures()
        self.pending = PendingFrees(upstream, self._complete, self.captures)
        self.live: dict[int, Block] = {}
        self.uncached: dict[int, int] = {}
        self.refusal: Callable[[], Exception] | None = None
        self._compiled = compiled
        self.invalid_frees: deque[InvalidFree] = deque(maxlen=_MAX_INVALID_FREES)
        self._invalid_numbers = count(1)
        self._slow: set[SlowPathReason] = set()

    def connect(self, slow_calls: SlowCalls) -> None:
        """Create the fast path. This is a separate step because ``slow_calls`` need this state."""
        self.fast_path: FastPath | NativeFastPath
        if self._compiled:
            native = self._compiled.FastPath
            self.fast_path = native(self.engine, self.gate, self.live, slow_calls)
        else:
            self.fast_path = FastPath(self.engine, self.guard, self.live, slow_calls)

    def locked(self) -> AbstractContextManager[None]:
        """Hold the guard during a ``with`` block. Raises Reentered."""
        return self.guard.locked()

    def retire(self, refusal: Callable[[], Exception] | None) -> None:
        """Ignore frees from now on; if ``refusal`` is given, allocations raise the error that it returns."""
        self.refusal = refusal
        self.set_slow("retired", on=True)

    def set_slow(self, reason: SlowPathReason, *, on: bool) -> None:
        """Add or remove a reason why the fast path is off."""
        if on:
            self._slow.add(reason)
        else:
            self._slow.discard(reason)
        self.gate.slow = bool(self._slow)

    def is_slow(self, reason: SlowPathReason) -> bool:
        """Return whether the fast path is off for a certain reason."""
        return reason in self._slow

    def free_live(self, block: Block, stack: RawStack | None, stream: int | None = None) -> None:
        """Free a block that was removed from ``live``; ``stream`` may use it. The caller holds the guard."""
        if stream is not None:
            self.pending.add_use(block, stream_number(stream))
        if block.stream_uses:
            self.set_slow("pending", on=True)
            self.engine.free(block, stack)
            self.pending.add(block)
        else:
            self.engine.free(block, stack)

    def _complete(self, block: Block, stack: RawStack | None) -> None:
        self.set_slow("pending", on=self.pending.count > 0)
        self.engine.complete_free(block, stack)

    # Methods for cached memory.

    def empty_cache(self, stack: RawStack | None) -> None:
        """Wait for pending frees, and release all cached segments. Raises CudaError."""
        self.engine.stats.num_sync_all_streams += 1
        self.pending.synchronize(stack)
        self.cache.release_cached_blocks(stack)

    def empty_pool(self, pool: PrivatePool, stack: RawStack | None) -> None:
        """Wait for pending frees of a private pool without holders, and release it. Raises CudaError."""
        if not pool.uses:
            self.engine.stats.num_sync_all_streams += 1
            self.pending.synchronize(stack, pool=pool.id)
            self.cache.release_private_pool(pool, stack)

    # Methods for watchers.

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call a function after every change. The caller holds the guard."""
        if watcher not in self.guard.watchers:
            self.guard.watchers.append(watcher)
        self.set_slow("watched", on=True)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Stop calling a function after changes. The caller holds the guard."""
        if watcher in self.guard.watchers:
            self.guard.watchers.remove(watcher)
        self.set_slow("watched", on=bool(self.guard.watchers))

    # Methods for invalid pointers.

    def refuse_free(self, ptr: int, stack: RawStack | None) -> InvalidPointer:
        """Record an invalid free, and return the error to raise."""
        reason = "it was freed from within the allocator"
        if self.guard.try_enter():
            try:
                reason = self.describe_invalid_pointer(ptr)
            finally:
                self.guard.leave()
        self.invalid_frees.append(InvalidFree(ptr, reason, stack))
        self.engine.stats.num_invalid_frees = next(self._invalid_numbers)
        return InvalidPointer(
            f"nothing is allocated at {ptr:#x}: {reason}",
            hint="free each allocation once, by the address that alloc returned",
        )

    def describe_invalid_pointer(self, ptr: int) -> str:
        """Describe an address at which no live allocation begins. The caller holds the guard."""
        segment = self.engine.segments.find(ptr)
        if segment is None:
            return "it belongs to no segment of this allocator, or its segment was released"
        block = next(block for block in reversed(segment.blocks()) if block.ptr <= ptr)
        if not block.allocated or ptr == block.ptr:
            waits = "" if block.free else ", and other streams still use it"
            return f"it was freed before{waits}"
        return (
            f"it lies {ptr - block.ptr} bytes into the allocation of {format_bytes(block.requested)}"
            f" at {block.ptr:#x}"
        )


def checked_size(size_bytes: int) -> int:
    """Return the size of a request as an int. Raises InvalidSize, and TypeError for other types."""
    size_bytes = int(index(size_bytes))
    if size_bytes < 0:
        raise InvalidSize(f"cannot allocate {size_bytes} bytes", hint="a size is 0 or more bytes")
    return size_bytes


def delegated(
    method: Callable[Concatenate[Any, _P], _R], attribute: str
) -> Callable[Concatenate[Any, _P], _R]:
    """Return a method for the allocator that calls a method of its attribute ``attribute``."""
    find = attrgetter(f"{attribute}.{method.__name__}")

    @wraps(method)
    def call(allocator: Any, /, *args: _P.args, **options: _P.kwargs) -> _R:
        result: _R = find(allocator)(*args, **options)
        return result

    return call
