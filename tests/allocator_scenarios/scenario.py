"""Scenarios: operations on any allocator, and checks between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

DEFAULT = ""  # the default stream
STREAMS = (
    "s1",
    "s2",
    "s3",
    "s4",
)  # The order is that of the handles, by which allocators sort streams.


class CannotRun(Exception):
    """This subject cannot run a scenario, for the reason in the message."""


class Subject(Protocol):
    """An allocator with an empty cache, and streams for it.

    A stream is idle unless it is ``busy``. The scenario names pools and graphs.
    """

    name: str

    # --- the scenario, from its beginning to its end
    def begin(self, settings: str) -> None: ...
    def end(self) -> None: ...

    # --- memory
    def alloc(self, size_bytes: int, stream: str = DEFAULT, *, raw: bool = False) -> int:
        """Allocate; with ``raw`` not through tensors."""
        ...

    def try_alloc(self, size_bytes: int, stream: str = DEFAULT, *, raw: bool = False) -> int:
        """Allocate, or return 0 if out of memory."""
        ...

    def out_of_memory_message(self, size_bytes: int, stream: str = DEFAULT) -> str:
        """Return the out-of-memory message of an allocation; empty if it succeeds, and then free it."""
        ...

    def free(self, ptr: int) -> None: ...
    def rejects_free(self, ptr: int) -> bool: ...
    def record_use(self, ptr: int, stream: str) -> None:
        """Record that a stream uses an allocation (record_stream)."""
        ...

    def empty_cache(self) -> None: ...

    # --- work
    def keep_busy(self, stream: str) -> None:
        """Keep a stream busy until ``settle`` is called, but for at most two seconds."""
        ...

    def finish_work(self, stream: str) -> None: ...
    def make_wait(self, stream: str, other_stream: str) -> None:
        """Make a stream wait for the current work of another."""
        ...

    def enqueue_work(self, stream: str) -> None:
        """Enqueue work on a stream; add a node to the graph if the stream is captured."""
        ...

    # --- settings and limits
    @property
    def total_bytes(self) -> int: ...
    def configure(self, settings: str) -> None: ...
    def rejects_settings(self, settings: str) -> bool: ...
    def set_memory_fraction(self, fraction: float) -> None: ...
    def memory_fraction(self) -> float: ...
    def memory_fraction_error(self, fraction: object) -> str:
        """Return the name of the error that a fraction raises; empty if none."""
        ...

    def enable_caching(self, *, enabled: bool) -> None: ...
    def on_out_of_memory(self, observer: Callable[[], None]) -> None:
        """Call a function at each out of memory, until ``end``."""
        ...

    # --- pools and captures
    def make_pool(
        self, *, separate_upstream: bool = False, use_on_oom: bool = False, no_split: bool = False
    ) -> Any:
        """Create a pool; ``separate_upstream`` gives it an upstream of its own."""
        ...

    def pool_id_and_use_count(self, pool: Any) -> tuple[tuple[int, int], int]:
        """Return the id and the use count of a pool."""
        ...

    def upstream_call_counts(self, pool: Any) -> tuple[int, int]:
        """Return the numbers of allocations and frees of a pool's separate upstream."""
        ...

    def use_pool(self, pool: Any) -> AbstractContextManager[None]: ...
    def close_pool(self, pool: Any) -> None: ...
    def pool_snapshot(self, pool: Any) -> list[dict[str, Any]]: ...
    def capture(self, stream: str, graph: Any = None) -> AbstractContextManager[Any]:
        """Capture a stream, into the pool of ``graph`` if given, and yield the graph."""
        ...

    def close_graph(self, graph: Any) -> None: ...
    def save_pool(self, graph: Any) -> Any: ...
    def restore_pool(self, graph: Any, state: Any, stale: Collection[int]) -> Collection[int]:
        """Restore a pool, and return its live allocations."""
        ...

    def live_allocations_are(self, graph: Any, live: Collection[int]) -> bool: ...

    # --- statistics and snapshots
    def statistics(self) -> dict[str, int]: ...
    def snapshot(self) -> dict[str, Any]: ...
    def reset_peaks(self) -> None: ...
    def reset_sums(self) -> None: ...
    def record_history(
        self,
        history: str | None = "all",
        *,
        context: str | None = None,
        max_entries: int = 1 << 40,
        skip: Collection[str] = (),
        clear: bool = False,
    ) -> None: ...
    def set_metadata(self, text: str) -> None: ...
    def stream_names(self) -> dict[int, str]: ...
    def pool_names(self) -> dict[tuple[int, int], str]: ...


KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

FREE, LIVE, PENDING = "inactive", "active_allocated", "active_pending_free"
Layout: TypeAlias = "list[list[tuple[int, str]]]"


@dataclass(frozen=True, slots=True)
class Check:
    """A point at which statistics and a snapshot are taken and checked.

    ``changes`` are those of statistics since the check before: ``segment`` stands for
    ``segment.all.current``, ``segment.small_pool`` for its ``current``, and others for themselves. ``now``
    are values. ``blocks`` are the size and the state of each block, by segment in order of allocation.
    ``facts`` must all be true. ``restored``: since the previous check only a pool of several segments was
    restored; the order of its segments is ignored.
    """

    label: str
    changes: Mapping[str, int] = field(default_factory=dict)
    now: Mapping[str, int] = field(default_factory=dict)
    blocks: Layout | None = None
    facts: Mapping[str, bool] = field(default_factory=dict)
    restored: bool = False

    @property
    def expects_something(self) -> bool:
        """Whether the check can fail by itself, without another subject."""
        return bool(self.changes or self.now or self.blocks is not None or self.facts)


Steps: TypeAlias = Iterator[Check]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One of the numbered scenarios; several may share a number."""

    number: int
    name: str
    steps: Callable[[Subject], Steps]
    settings: str = ""
    without_torch: str = ""  # The reason why PyTorch cannot run the scenario.
    without_memory: str = ""  # The reason why a simulated device cannot run the scenario.


def scenario(
    number: int,
    name: str,
    *,
    settings: str = "",
    without_torch: str = "",
    without_memory: str = "",
) -> Callable[[Callable[[Subject], Steps]], Scenario]:
    """Turn a function into a scenario."""

    def make(steps: Callable[[Subject], Steps]) -> Scenario:
        return Scenario(number, name, steps, settings, without_torch, without_memory)

    return make


def full_name(statistic: str) -> str:
    """Return the full name of a statistic."""
    if statistic.startswith(("num_", "max_")):
        return statistic
    parts = statistic.split(".")
    if parts[0].startswith("oversize_"):
        return statistic if len(parts) == 2 else f"{statistic}.current"
    return ".".join([*parts, *("all", "current")[len(parts) - 1 :]])
