"""Scenarios: operations on an allocator, and what must be true between them, whoever allocates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

DEFAULT = ""  # the name of the default stream
STREAMS = ("s1", "s2", "s3", "s4")  # by rising handles, in which order allocators keep them


class CannotRun(Exception):
    """This subject has nothing to run a scenario with; the reason is said."""


class Subject(Protocol):
    """An allocator with nothing in its cache, and streams for it.

    A stream has done all its work, unless it is ``busy``. What is called a pool or a graph is named by the
    scenario.
    """

    name: str

    # --- the scenario, from its beginning to its end
    def begin(self, settings: str) -> None: ...
    def end(self) -> None: ...

    # --- memory
    def alloc(self, size_bytes: int, stream: str = DEFAULT, *, raw: bool = False) -> int:
        """Allocate; ``raw`` bypasses tensors where there are any."""
        ...

    def attempt(self, size_bytes: int, stream: str = DEFAULT, *, raw: bool = False) -> int:
        """Allocate, or return 0 where memory is out."""
        ...

    def refusal(self, size_bytes: int, stream: str = DEFAULT) -> str:
        """Return what is said when memory is out; nothing where it is not, and then frees what was given."""
        ...

    def free(self, ptr: int) -> None: ...
    def refuses_to_free(self, ptr: int) -> bool: ...
    def use(self, ptr: int, stream: str) -> None:
        """Say that a stream uses an allocation (record_stream)."""
        ...

    def empty_cache(self) -> None: ...

    # --- work
    def busy(self, stream: str) -> None:
        """Let a stream wait until it is settled, for two seconds at most."""
        ...

    def settle(self, stream: str) -> None: ...
    def join(self, stream: str, other: str) -> None:
        """Let a stream wait for what another has been given so far."""
        ...

    def work(self, stream: str) -> None:
        """Give a stream something to do, which is a node in a capture."""
        ...

    # --- settings and limits
    @property
    def total_bytes(self) -> int: ...
    def configure(self, settings: str) -> None: ...
    def refuses(self, settings: str) -> bool: ...
    def limit(self, fraction: float) -> None: ...
    def fraction(self) -> float: ...
    def limit_error(self, fraction: object) -> str:
        """Return the name of the error that a fraction raises, or nothing."""
        ...

    def caching(self, *, enabled: bool) -> None: ...
    def on_out_of_memory(self, observer: Callable[[], None]) -> None:
        """Call a function each time that memory is out, until the end."""
        ...

    # --- pools and captures
    def make_pool(
        self, *, own: bool = False, use_on_oom: bool = False, no_split: bool = False
    ) -> Any:
        """Make a pool, ``own`` with an allocator of its own."""
        ...

    def pool_facts(self, pool: Any) -> tuple[tuple[int, int], int]:
        """Return the id and the use count of a pool."""
        ...

    def own_calls(self, pool: Any) -> tuple[int, int]:
        """Return how often the allocator of a pool was asked to allocate and to free."""
        ...

    def inside(self, pool: Any) -> AbstractContextManager[None]: ...
    def drop_pool(self, pool: Any) -> None: ...
    def pool_snapshot(self, pool: Any) -> list[dict[str, Any]]: ...
    def capture(self, stream: str, graph: Any = None) -> AbstractContextManager[Any]:
        """Capture a stream, into the pool of another graph where one is given; yields the graph."""
        ...

    def drop_graph(self, graph: Any) -> None: ...
    def save_pool(self, graph: Any) -> Any: ...
    def restore_pool(self, graph: Any, state: Any, stale: Collection[int]) -> Collection[int]:
        """Bring a pool back to a state; returns the allocations that are live then."""
        ...

    def live_set_is(self, graph: Any, live: Collection[int]) -> bool: ...

    # --- what is known
    def statistics(self) -> dict[str, int]: ...
    def snapshot(self) -> dict[str, Any]: ...
    def reset_peaks(self) -> None: ...
    def reset_sums(self) -> None: ...
    def record(
        self,
        history: str | None = "all",
        *,
        context: str | None = None,
        max_entries: int = 1 << 40,
        skip: Collection[str] = (),
        clear: bool = False,
    ) -> None: ...
    def metadata(self, text: str) -> None: ...
    def stream_names(self) -> dict[int, str]: ...
    def pool_names(self) -> dict[tuple[int, int], str]: ...


KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

FREE, LIVE, PENDING = "inactive", "active_allocated", "active_pending_free"
Layout: TypeAlias = "list[list[tuple[int, str]]]"


@dataclass(frozen=True, slots=True)
class Check:
    """A point at which statistics and a snapshot are taken, and what must hold there.

    ``changes`` are those of statistics since the check before: ``segment`` stands for
    ``segment.all.current``, ``segment.small_pool`` for its ``current``, and others for themselves. ``now``
    are values. ``blocks`` are the size and the state of each block, segment by segment as they were taken;
    ``facts`` are all true. ``restored``: since the check before, a pool of several segments was brought back
    to a state, and nothing else was done; in which order it went through the segments is left open.
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
    without_torch: str = ""  # why PyTorch has no part in it
    without_memory: str = ""  # why a device in memory cannot carry it


def scenario(
    number: int,
    name: str,
    *,
    settings: str = "",
    without_torch: str = "",
    without_memory: str = "",
) -> Callable[[Callable[[Subject], Steps]], Scenario]:
    """Make a function a scenario."""

    def make(steps: Callable[[Subject], Steps]) -> Scenario:
        return Scenario(number, name, steps, settings, without_torch, without_memory)

    return make


def full_name(statistic: str) -> str:
    """Return the name in the statistics that a short one stands for."""
    if statistic.startswith(("num_", "max_")):
        return statistic
    parts = statistic.split(".")
    if parts[0].startswith("oversize_"):
        return statistic if len(parts) == 2 else f"{statistic}.current"
    return ".".join([*parts, *("all", "current")[len(parts) - 1 :]])
