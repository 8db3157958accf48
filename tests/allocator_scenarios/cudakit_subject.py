"""cudakit's allocator as a subject of scenarios, over any upstream."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from allocator_scenarios.canonical import Addresses
from allocator_scenarios.scenario import DEFAULT
from allocator_scenarios.streams_at_work import Work, WorkInMemory
from allocator_scenarios.upstreams import UpstreamAtAddresses, UpstreamInMemory
from cudakit.allocator.allocator import DeviceCachingAllocator, InvalidPointer
from cudakit.allocator.memory import PoolState
from cudakit.allocator.oom import OutOfMemory
from cudakit.allocator.pools import GraphMemory, MemPool
from cudakit.allocator.upstream import Upstream
from cudakit.errors import InputError
from cudakit.torch_rules.settings import parse_config


class CountingUpstream:
    """An upstream that counts the upstream of malloc and free."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.malloc_count = self.free_count = 0

    def malloc(self, size_bytes: int, stream: int) -> int:
        self.malloc_count += 1
        return self._upstream.malloc(size_bytes, stream)

    def free(self, ptr: int) -> None:
        self.free_count += 1
        self._upstream.free(ptr)


class CudakitSubject:
    """cudakit's allocator in PyTorch's mode: without ``search_again``."""

    def __init__(self, upstream: Upstream, work: Work, *, name: str = "cudakit") -> None:
        self.name = name
        self._upstream = upstream
        self._work = work

    # Begin and end of a scenario

    def begin(self, settings: str) -> None:
        self.allocator = DeviceCachingAllocator(self._upstream, search_again=False)
        self._live_ptrs: set[int] = set()
        self._streams_using: dict[int, set[str]] = {}
        self._busy_streams: set[str] = set()
        self._reset_pools()
        if settings:
            self.configure(settings)
        self.record_history()

    def end(self) -> None:
        for stream in list(self._busy_streams):
            self.finish_work(stream)
        for ptr in list(self._live_ptrs):
            self.free(ptr)
        self._close_all()
        self.allocator.close()

    # Memory

    def alloc(self, size_bytes: int, stream: str = DEFAULT, *, raw: bool = False) -> int:  # noqa: ARG002
        ptr = int(self.allocator.alloc(size_bytes, self._stream_number(stream)))
        if ptr:
            self._live_ptrs.add(ptr)
        return ptr

    def try_alloc(self, size_bytes: int, stream: str = DEFAULT, *, raw: bool = False) -> int:
        try:
            return self.alloc(size_bytes, stream, raw=raw)
        except OutOfMemory:
            return 0

    def out_of_memory_message(self, size_bytes: int, stream: str = DEFAULT) -> str:
        try:
            self.free(self.alloc(size_bytes, stream))
        except OutOfMemory as error:
            return str(error)
        return ""

    def free(self, ptr: int) -> None:
        self._live_ptrs.discard(ptr)
        self.allocator.free(ptr)
        streams = self._streams_using.pop(ptr, set())
        if not self.capturing:
            for stream in streams - self._busy_streams:
                self._work.finish_work(stream)

    def rejects_free(self, ptr: int) -> bool:
        try:
            self.allocator.free(ptr)
        except InvalidPointer:
            return True
        return False

    def record_use(self, ptr: int, stream: str) -> None:
        self.allocator.record_use(ptr, self._stream_number(stream))
        self._streams_using.setdefault(ptr, set()).add(stream)

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    # Work on streams

    def keep_busy(self, stream: str) -> None:
        self._busy_streams.add(stream)
        self._work.keep_busy(stream)

    def finish_work(self, stream: str) -> None:
        self._busy_streams.discard(stream)
        self._work.finish_work(stream)

    def make_wait(self, stream: str, other_stream: str) -> None:
        self._work.make_wait(stream, other_stream)

    def enqueue_work(self, stream: str) -> None:
        self._work.enqueue_work(stream)

    # Settings and limits

    @property
    def total_bytes(self) -> int:
        return self._upstream.memory_info().total_bytes

    def configure(self, settings: str) -> None:
        fraction = self.allocator.settings.memory_fraction
        self.allocator.configure(replace(parse_config(settings), memory_fraction=fraction))

    def rejects_settings(self, settings: str) -> bool:
        try:
            parse_config(settings)
        except InputError:
            return True
        return False

    def set_memory_fraction(self, fraction: float) -> None:
        self.allocator.set_memory_fraction(fraction)

    def memory_fraction(self) -> float:
        return self.allocator.settings.memory_fraction

    def memory_fraction_error(self, fraction: object) -> str:
        try:
            self.allocator.set_memory_fraction(fraction)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            return type(error).__name__
        return ""

    def enable_caching(self, *, enabled: bool) -> None:
        self.allocator.enable_caching(enabled=enabled)

    def on_out_of_memory(self, observer: Callable[[], None]) -> None:
        self.allocator.on_out_of_memory(lambda _: observer())

    # Pools and captures, by number

    def _reset_pools(self) -> None:
        """Forget the pools and graphs of the previous scenario."""
        self.capturing = False
        self._pools: dict[int, MemPool] = {}
        self._pool_upstreams: dict[int, CountingUpstream] = {}
        self._graphs: dict[int, GraphMemory] = {}
        self._pool_names: dict[tuple[int, int], str] = {}
        self._last_id = 0

    def make_pool(
        self, *, separate_upstream: bool = False, use_on_oom: bool = False, no_split: bool = False
    ) -> int:
        upstream = CountingUpstream(self._upstream) if separate_upstream else None
        pool = MemPool(self.allocator, upstream=upstream, use_on_oom=use_on_oom, no_split=no_split)
        number = self._new_id(pool.id)
        self._pools[number] = pool
        if upstream:
            self._pool_upstreams[number] = upstream
        return number

    def pool_id_and_use_count(self, pool: int) -> tuple[tuple[int, int], int]:
        return self._pools[pool].id, self._pools[pool].uses

    def upstream_call_counts(self, pool: int) -> tuple[int, int]:
        upstream = self._pool_upstreams[pool]
        return upstream.malloc_count, upstream.free_count

    @contextmanager
    def use_pool(self, pool: int) -> Iterator[None]:
        with self.allocator.use_pool(self._pools[pool]):
            yield

    def close_pool(self, pool: int) -> None:
        self._pools.pop(pool).close()

    def pool_snapshot(self, pool: int) -> list[dict[str, Any]]:
        return self._pools[pool].snapshot()

    @contextmanager
    def capture(self, stream: str, graph: int | None = None) -> Iterator[int]:
        shared = self._graphs[graph].id if graph is not None else None
        captured = self._work.begin_capture(stream)
        self.capturing = True
        try:
            with self.allocator.capture(
                shared, self._work.numbers[stream], graph=captured
            ) as memory:
                number = self._new_id(memory.id)
                self._graphs[number] = memory
                yield number
        finally:
            self._work.end_capture(stream)
            self.capturing = False

    def close_graph(self, graph: int) -> None:
        self._graphs.pop(graph).close()

    def save_pool(self, graph: int) -> PoolState:
        return self.allocator.checkpoint(self._graphs[graph])

    def restore_pool(
        self,
        graph: int,  # noqa: ARG002  # the state identifies the graph
        state: PoolState,
        stale: Collection[int],
    ) -> Collection[int]:
        restored = self.allocator.restore(state)
        self.allocator.snapshot()  # PyTorch's trace has an entry of a snapshot here
        self._live_ptrs.difference_update(stale)
        self._live_ptrs.update(restored.created)
        return restored.created

    def live_allocations_are(self, graph: int, live: Collection[int]) -> bool:
        return self.allocator.holds_exactly(self._graphs[graph], live)

    def _close_all(self) -> None:
        """Close every pool and graph."""
        for owner in (*self._pools.values(), *self._graphs.values()):
            owner.close()

    def pool_names(self) -> dict[tuple[int, int], str]:
        return self._pool_names

    def _new_id(self, pool: tuple[int, int]) -> int:
        self._last_id += 1
        self._pool_names.setdefault(pool, f"pool {len(self._pool_names) + 1}")
        return self._last_id

    # Statistics and snapshots

    def statistics(self) -> dict[str, int]:
        return self.allocator.statistics()

    def snapshot(self) -> dict[str, Any]:
        return self.allocator.snapshot()

    def reset_peaks(self) -> None:
        self.allocator.reset_peaks()

    def reset_sums(self) -> None:
        self.allocator.reset_sums()

    def record_history(
        self,
        history: Any = "all",
        *,
        context: Any = None,
        max_entries: int = 1 << 40,
        skip: Collection[str] = (),
        clear: bool = False,
    ) -> None:
        self.allocator.record_history(
            history, context=context, max_entries=max_entries, skip_actions=skip, clear=clear
        )

    def set_metadata(self, text: str) -> None:
        self.allocator.set_metadata(text)

    def stream_names(self) -> dict[int, str]:
        return {number: name for name, number in self._work.numbers.items()}

    def _stream_number(self, stream: str) -> int:
        return self._work.numbers[stream] if stream else 0


def in_memory(addresses: Addresses | None = None, *, rising: bool = True) -> CudakitSubject:
    """Return cudakit's allocator on a device in memory, with given, rising or falling addresses."""
    device = UpstreamInMemory(rising=rising)
    upstream = UpstreamAtAddresses(device, addresses) if addresses else device
    return CudakitSubject(upstream, WorkInMemory(device), name="in memory")
