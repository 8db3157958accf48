"""cudakit's allocator as a subject of scenarios, over any upstream."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from allocator_scenarios.canonical import Addresses
from allocator_scenarios.scenario import DEFAULT
from allocator_scenarios.streams_at_work import Work, WorkInMemory
from allocator_scenarios.upstreams import InMemory, Placed
from cudakit.core.allocator.allocator import CachingAllocator
from cudakit.core.allocator.oom import OutOfMemory
from cudakit.core.allocator.pool_calls import PoolState
from cudakit.core.allocator.private_pools import GraphMemory, MemPool
from cudakit.core.allocator.state import InvalidPointer
from cudakit.core.allocator.upstream import Upstream
from cudakit.errors import InputError
from cudakit.torch_rules.settings import parse_config


class Calls:
    """An upstream that counts its calls."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.made = self.freed = 0

    def malloc(self, size_bytes: int, stream: int) -> int:
        self.made += 1
        return self._upstream.malloc(size_bytes, stream)

    def free(self, ptr: int) -> None:
        self.freed += 1
        self._upstream.free(ptr)


class Ours:
    """cudakit's allocator in PyTorch's mode: without ``search_again``."""

    def __init__(self, upstream: Upstream, work: Work, *, name: str = "cudakit") -> None:
        self.name = name
        self._upstream = upstream
        self._work = work

    # Begin and end of a scenario

    def begin(self, settings: str) -> None:
        self.allocator = CachingAllocator(self._upstream, search_again=False)
        self._live: set[int] = set()
        self._used: dict[int, set[str]] = {}
        self._busy: set[str] = set()
        self._forget_pools()
        if settings:
            self.configure(settings)
        self.record()

    def end(self) -> None:
        for stream in list(self._busy):
            self.settle(stream)
        for ptr in list(self._live):
            self.free(ptr)
        self._drop_all()
        self.allocator.close()

    # Memory

    def alloc(self, size_bytes: int, stream: str = DEFAULT, *, raw: bool = False) -> int:  # noqa: ARG002
        ptr = int(self.allocator.alloc(size_bytes, self._number(stream)))
        if ptr:
            self._live.add(ptr)
        return ptr

    def attempt(self, size_bytes: int, stream: str = DEFAULT, *, raw: bool = False) -> int:
        try:
            return self.alloc(size_bytes, stream, raw=raw)
        except OutOfMemory:
            return 0

    def refusal(self, size_bytes: int, stream: str = DEFAULT) -> str:
        try:
            self.free(self.alloc(size_bytes, stream))
        except OutOfMemory as error:
            return str(error)
        return ""

    def free(self, ptr: int) -> None:
        self._live.discard(ptr)
        self.allocator.free(ptr)
        used = self._used.pop(ptr, set())
        if not self.capturing:
            for stream in used - self._busy:
                self._work.settle(stream)

    def refuses_to_free(self, ptr: int) -> bool:
        try:
            self.allocator.free(ptr)
        except InvalidPointer:
            return True
        return False

    def use(self, ptr: int, stream: str) -> None:
        self.allocator.record_use(ptr, self._number(stream))
        self._used.setdefault(ptr, set()).add(stream)

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    # Work on streams

    def busy(self, stream: str) -> None:
        self._busy.add(stream)
        self._work.busy(stream)

    def settle(self, stream: str) -> None:
        self._busy.discard(stream)
        self._work.settle(stream)

    def join(self, stream: str, other_stream: str) -> None:
        self._work.join(stream, other_stream)

    def work(self, stream: str) -> None:
        self._work.work(stream)

    # Settings and limits

    @property
    def total_bytes(self) -> int:
        return self._upstream.memory_info().total_bytes

    def configure(self, settings: str) -> None:
        kept = self.allocator.settings.memory_fraction
        self.allocator.configure(replace(parse_config(settings), memory_fraction=kept))

    def refuses(self, settings: str) -> bool:
        try:
            parse_config(settings)
        except InputError:
            return True
        return False

    def limit(self, fraction: float) -> None:
        self.allocator.set_memory_fraction(fraction)

    def fraction(self) -> float:
        return self.allocator.settings.memory_fraction

    def limit_error(self, fraction: object) -> str:
        try:
            self.allocator.set_memory_fraction(fraction)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            return type(error).__name__
        return ""

    def caching(self, *, enabled: bool) -> None:
        self.allocator.enable_caching(enabled=enabled)

    def on_out_of_memory(self, observer: Callable[[], None]) -> None:
        self.allocator.on_out_of_memory(lambda _: observer())

    # Pools and captures, by number

    def _forget_pools(self) -> None:
        """Begin without streams or pools."""
        self.capturing = False
        self._pools: dict[int, MemPool] = {}
        self._calls: dict[int, Calls] = {}
        self._graphs: dict[int, GraphMemory] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._made = 0

    def make_pool(
        self, *, own: bool = False, use_on_oom: bool = False, no_split: bool = False
    ) -> int:
        calls = Calls(self._upstream) if own else None
        pool = MemPool(self.allocator, upstream=calls, use_on_oom=use_on_oom, no_split=no_split)
        number = self._numbered(pool.id)
        self._pools[number] = pool
        if calls:
            self._calls[number] = calls
        return number

    def pool_facts(self, pool: int) -> tuple[tuple[int, int], int]:
        return self._pools[pool].id, self._pools[pool].uses

    def own_calls(self, pool: int) -> tuple[int, int]:
        return self._calls[pool].made, self._calls[pool].freed

    @contextmanager
    def inside(self, pool: int) -> Iterator[None]:
        with self.allocator.use_pool(self._pools[pool]):
            yield

    def drop_pool(self, pool: int) -> None:
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
                number = self._numbered(memory.id)
                self._graphs[number] = memory
                yield number
        finally:
            self._work.end_capture(stream)
            self.capturing = False

    def drop_graph(self, graph: int) -> None:
        self._graphs.pop(graph).close()

    def save_pool(self, graph: int) -> PoolState:
        return self.allocator.checkpoint(self._graphs[graph])

    def restore_pool(
        self,
        graph: int,  # noqa: ARG002  # which the state names too
        state: PoolState,
        stale: Collection[int],
    ) -> Collection[int]:
        restored = self.allocator.restore(state)
        self.allocator.snapshot()  # PyTorch's is asked what is live by one, which is in the trace
        self._live.difference_update(stale)
        self._live.update(restored.created)
        return restored.created

    def live_set_is(self, graph: int, live: Collection[int]) -> bool:
        return self.allocator.holds_exactly(self._graphs[graph], live)

    def _drop_all(self) -> None:
        """Close every pool and graph."""
        for held in (*self._pools.values(), *self._graphs.values()):
            held.close()

    def pool_names(self) -> dict[tuple[int, int], str]:
        return self._names

    def _numbered(self, pool: tuple[int, int]) -> int:
        self._made += 1
        self._names.setdefault(pool, f"pool {len(self._names) + 1}")
        return self._made

    # Statistics and snapshots

    def statistics(self) -> dict[str, int]:
        return self.allocator.statistics()

    def snapshot(self) -> dict[str, Any]:
        return self.allocator.snapshot()

    def reset_peaks(self) -> None:
        self.allocator.reset_peaks()

    def reset_sums(self) -> None:
        self.allocator.reset_sums()

    def record(
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

    def metadata(self, text: str) -> None:
        self.allocator.set_metadata(text)

    def stream_names(self) -> dict[int, str]:
        return {number: name for name, number in self._work.numbers.items()}

    def _number(self, stream: str) -> int:
        return self._work.numbers[stream] if stream else 0


def in_memory(addresses: Addresses | None = None, *, rising: bool = True) -> Ours:
    """Return cudakit's allocator on a device in memory, with given, rising or falling addresses."""
    device = InMemory(rising=rising)
    upstream = Placed(device, addresses) if addresses else device
    return Ours(upstream, WorkInMemory(device), name="in memory")
