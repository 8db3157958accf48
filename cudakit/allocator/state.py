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

from cudakit.allocator.blocks import PLAIN_TYPES, Block, RawStack
from cudakit.allocator.engine import Engine
from cudakit.allocator.fast_path import FastPath, SlowCalls
from cudakit.allocator.guard import Gate, Guard
from cudakit.allocator.history import Events, History
from cudakit.allocator.private_pools import PrivatePool
from cudakit.allocator.segment_cache import SegmentCache
from cudakit.allocator.streams import Captures, PendingFrees
from cudakit.allocator.upstream import Upstream, stream_number
from cudakit.errors import Unsupported, UsageError
from cudakit.torch_rules.settings import Settings
from cudakit.units import format_bytes

if TYPE_CHECKING:
    from cudakit.allocator.native import FastPath as NativeFastPath

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
        return import_module("cudakit.allocator.native")
    except ImportError:
        return None


class AllocatorState:
    """The state of the allocator of one device. ``live_blocks`` has the allocated blocks by address.

    ``native`` selects the native or the plain types; None selects the native types if they were compiled.

    ``uncached_sizes`` has the sizes of allocations that were made while caching was off, by address.
    ``new_refusal`` is None until the allocator is closed or its process was forked. Then it returns the
    error of later allocations.
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
        compiled_module = native_module() if native is not False else None
        if native and compiled_module is None:
            raise Unsupported("the native types of the allocator were not compiled")
        self.gate: Gate = compiled_module.Gate() if compiled_module else Gate()
        self.guard: Guard[QueuedFree] = Guard(
            lambda queued: self.free_live_block(*queued), self.gate
        )
        self.history = History(compiled_module.Events if compiled_module else Events)
        block_types = compiled_module.NATIVE_TYPES if compiled_module else PLAIN_TYPES
        self.engine = Engine(upstream, settings, block_types)
        self.cache = SegmentCache(self.engine)
        self.captures = Captures()
        self.pending_frees = PendingFrees(upstream, self._complete_free, self.captures)
        self.live_blocks: dict[int, Block] = {}
        self.uncached_sizes: dict[int, int] = {}
        self.new_refusal: Callable[[], Exception] | None = None
        self._compiled_module = compiled_module
        self.invalid_frees: deque[InvalidFree] = deque(maxlen=_MAX_INVALID_FREES)
        self._invalid_free_numbers = count(1)
        self._slow_path_reasons: set[SlowPathReason] = set()

    def create_fast_path(self, slow_calls: SlowCalls) -> None:
        """Create the fast path, after the constructor: ``slow_calls`` need a complete state."""
        self.fast_path: FastPath | NativeFastPath
        if self._compiled_module:
            native_fast_path = self._compiled_module.FastPath
            self.fast_path = native_fast_path(self.engine, self.gate, self.live_blocks, slow_calls)
        else:
            self.fast_path = FastPath(self.engine, self.guard, self.live_blocks, slow_calls)

    def locked(self) -> AbstractContextManager[None]:
        """Hold the guard during a ``with`` block. Raises Reentered if this thread holds the guard already."""
        return self.guard.locked()

    def retire(self, new_refusal: Callable[[], Exception] | None) -> None:
        """Ignore frees from now on; allocations raise the error from ``new_refusal`` unless it is None."""
        self.new_refusal = new_refusal
        self.set_slow("retired", is_on=True)

    def set_slow(self, reason: SlowPathReason, *, is_on: bool) -> None:
        """Add or remove a reason why the fast path is off."""
        if is_on:
            self._slow_path_reasons.add(reason)
        else:
            self._slow_path_reasons.discard(reason)
        self.gate.slow = bool(self._slow_path_reasons)

    def is_slow(self, reason: SlowPathReason) -> bool:
        """Return whether the fast path is off for a certain reason."""
        return reason in self._slow_path_reasons

    def free_live_block(
        self, block: Block, stack: RawStack | None, stream: int | None = None
    ) -> None:
        """Free a block that is no longer in ``live_blocks``; ``stream`` may use it. Needs the guard."""
        if stream is not None:
            self.pending_frees.add_use(block, stream_number(stream))
        if block.stream_uses:
            self.set_slow("pending", is_on=True)
            self.engine.free(block, stack)
            self.pending_frees.add_block(block)
        else:
            self.engine.free(block, stack)

    def _complete_free(self, block: Block, stack: RawStack | None) -> None:
        self.set_slow("pending", is_on=self.pending_frees.pending_count > 0)
        self.engine.complete_free(block, stack)

    # Methods for cached memory.

    def empty_cache(self, stack: RawStack | None) -> None:
        """Wait for pending frees, and release all cached segments. Raises CudaError."""
        self.engine.stats.num_sync_all_streams += 1
        self.pending_frees.synchronize(stack)
        self.cache.release_cached_blocks(stack)

    def empty_pool(self, pool: PrivatePool, stack: RawStack | None) -> None:
        """Wait for pending frees of a private pool without holders, and release it. Raises CudaError."""
        if not pool.holder_count:
            self.engine.stats.num_sync_all_streams += 1
            self.pending_frees.synchronize(stack, pool=pool.id)
            self.cache.release_private_pool(pool, stack)

    # Methods for watchers.

    def add_watcher(self, watcher: Callable[[], None]) -> None:
        """Call a function after every change. The caller holds the guard."""
        if watcher not in self.guard.watchers:
            self.guard.watchers.append(watcher)
        self.set_slow("watched", is_on=True)

    def remove_watcher(self, watcher: Callable[[], None]) -> None:
        """Stop calling a function after changes. The caller holds the guard."""
        if watcher in self.guard.watchers:
            self.guard.watchers.remove(watcher)
        self.set_slow("watched", is_on=bool(self.guard.watchers))

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
        self.engine.stats.num_invalid_frees = next(self._invalid_free_numbers)
        return InvalidPointer(
            f"nothing is allocated at {ptr:#x}: {reason}",
            hint="free each allocation once, by the address that alloc returned",
        )

    def describe_invalid_pointer(self, ptr: int) -> str:
        """Describe an address at which no live allocation begins. The caller holds the guard."""
        segment = self.engine.segments.find_segment(ptr)
        if segment is None:
            return "it belongs to no segment of this allocator, or its segment was released"
        block = next(block for block in reversed(segment.blocks()) if block.ptr <= ptr)
        if not block.is_allocated or ptr == block.ptr:
            waiting_clause = "" if block.is_free else ", and other streams still use it"
            return f"it was freed before{waiting_clause}"
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
    method: Callable[Concatenate[Any, _P], _R], attribute_name: str
) -> Callable[Concatenate[Any, _P], _R]:
    """Return a method for the allocator that calls a method of its attribute ``attribute_name``."""
    get_method = attrgetter(f"{attribute_name}.{method.__name__}")

    @wraps(method)
    def call_method(allocator: Any, /, *args: _P.args, **options: _P.kwargs) -> _R:
        result: _R = get_method(allocator)(*args, **options)
        return result

    return call_method
